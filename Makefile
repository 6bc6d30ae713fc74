# Everything that a checkout can do; `make help` lists it. Each target sets up .venv first where it must.

PYTHON = python3
SEED = 1
JOBS = 2
PEERS = torch trl tunix
COMMA = ,
SPACE = $(COMMA:,=) $(COMMA:,=)
RUN = runs/quickstart$(if $(filter-out 1,$(SEED)),-seed$(SEED))

VENV = .venv
# glibc gives large temporaries huge pages: a tenth to a fifth faster on a CPU. Read when a process starts.
TUNED = GLIBC_TUNABLES=glibc.malloc.hugetlb=1
PY = $(VENV)/bin/python
# A file's tests stay together: they share what was made and compiled for them.
SPREAD = -n $(JOBS) --dist loadfile
READY = $(VENV)/.ready
BEGAN := $(shell date +%s)

# Another environment's settings would lead Python or pip away from ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIRE_VIRTUALENV

.DEFAULT_GOAL = help
.DELETE_ON_ERROR:
.PHONY: help setup quickstart test test-all lint types docs bench bench-peers doctor target-gpu target-tpu pictures clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## make .venv, with vLLM for this machine; PYTHON=... names another interpreter
	@echo "$(VENV) is ready"

quickstart: $(RUN)/sft/hf/config.json  ## train a small model from nothing and show what happened; SEED=1 RUN=DIR
	$(TUNED) $(PY) -m jppo.train --config=configs/quickstart.py:$(RUN) --config.trainer.seed=$(SEED)
	@echo "all together      $$(($$(date +%s) - $(BEGAN))) s, with all that had to be made first"

test: $(READY)  ## run the tests, a real vLLM among them; JOBS=2 processes at a time
	$(PY) -m pytest $(SPREAD) -m "not slow"

test-all: $(READY)  ## run the tests that take minutes too
	$(PY) -m pytest $(SPREAD)

lint: $(READY)  ## check style and format
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(READY)  ## check types
	$(PY) -m mypy

docs: $(READY)  ## make a site of docs/ in site/
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet
	@echo "site/index.html is ready; with its search: $(PY) -m http.server -d site"

bench: $(RUN)/sft/hf/config.json  ## measure all that is in benchmarks/, with tables; ARGS=...
	$(TUNED) $(PY) benchmarks/together.py $(ARGS)

bench-peers: $(READY)  ## measure jppo beside torch with transformers, TRL and tunix; PEERS=... ARGS=...
	@benchmarks/peers/setup.sh $(PYTHON) $(PEERS)
	$(TUNED) $(PY) benchmarks/contest.py --peers $(subst $(SPACE),$(COMMA),$(PEERS)) $(ARGS)

doctor: $(READY)  ## say what of this machine, and of a run by CONFIG=FILE, would stop a training; ARGS=...
	@$(PY) -m jppo.doctor $(if $(CONFIG),--config=$(CONFIG)) $(ARGS)

target-gpu: $(READY)  ## install XLA's compiler for GPUs that are not here in .targets/gpu, for --dry_run --machine=8xH100
	$(PY) -m jppo.targets.compilers gpu

target-tpu: $(READY)  ## the same for TPUs, for --dry_run --machine=v5e-16
	$(PY) -m jppo.targets.compilers tpu

pictures: $(READY)  ## photograph the report of a run for docs/, by a headless Chromium; RUN=DIR
	JPPO_PICTURES_OF=$(RUN) $(PY) -m pytest tests/test_report.py -k pictures

clean:  ## remove caches and builds; .venv and runs stay
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis .jax_cache
	find . -path ./$(VENV) -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Written last: a setup that was interrupted is done again.
$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV) $(PYTHON)
	@touch $@

# The last file that the command writes stands for all of them.
$(RUN)/data/model/generation_config.json: | $(READY)
	$(PY) -m examples.arithmetic --out $(RUN)/data --seed $(SEED)

$(RUN)/sft/hf/config.json: | $(RUN)/data/model/generation_config.json
	$(TUNED) $(PY) -m jppo.sft --config=configs/quickstart_sft.py:$(RUN) --config.trainer.seed=$(SEED)
