"""Every test runs on 8 CPU devices, with JAX's strict switches on, and without a network."""

import contextlib
import gc
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from concurrent.futures import Future

from tests import xla_flags

os.environ["XLA_FLAGS"] = (
    re.sub(r"--xla_force_host_platform_device_count=\S*", "", os.environ.get("XLA_FLAGS", ""))
    + f" {xla_flags.quick(devices=8)} --xla_cpu_parallel_codegen_split_count=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch and vLLM: more only disturb each other on few cores
# All workers of `pytest -n`, and the commands that tests start, share one cache of compiled programs.
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ.get("JAX_COMPILATION_CACHE_DIR") or tempfile.mkdtemp(
    prefix="jppo-tests-"
)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import numpy as np
import pytest

from examples import arithmetic
from jppo import settings
from jppo.models import decoder, hf, hf_write
from jppo.rollout.servers import make as rollout
from tests.make import trajectory, write_lines

jax.config.update("jax_platforms", "cpu")  # where a plugin imported jax before the lines above
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_debug_key_reuse", True)

QUICK = "jax_disable_most_optimizations"
# Files that take longest start first, so that both workers end at the same time.
LONG = ["test_hosts", "test_invariance", "test_api", "test_gateway", "test_decoder", "test_hf", "test_inprocess"]
LONG += ["test_real_vllm", "test_extension", "test_resume", "test_sandbox", "test_program_tests", "test_properties"]
LONG += ["test_api_losses", "test_fleet", "test_experts", "test_sandbox_hostile", "test_http_server", "test_pool"]
LONG += ["test_watchdog", "test_agreement", "test_kernels", "test_train", "test_recipes", "test_supervised"]
LONG += ["test_extending", "test_lora", "test_verl_bash"]
# Tests that take longest; other cases, or other tests of the same thing, remain in `make test`.
SLOW = pathlib.Path(__file__).with_name("slow.txt")
MAPS = pathlib.Path("/proc/self/maps")
SHARED = pathlib.Path(__file__).resolve().parents[2] / "shared"


def pytest_configure():
    # Under nohup, or in the background of a script, a process inherits that these are ignored, and so do its children.
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart():
    found = jax.devices()
    if [d.platform for d in found] != ["cpu"] * 8:
        pytest.exit(f"tests need 8 CPU devices, jax has {found}: something used it before conftest.py", 3)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(config, items):
    slow = SLOW.read_text(encoding="utf-8").splitlines()
    found = {item.nodeid: item for item in items}
    for name in found.keys() & slow:
        found[name].add_marker(pytest.mark.slow)
    some = config.option.keyword or getattr(config.option, "lf", False)  # of a file's tests
    whole = not some and not any("::" in argument for argument in config.args)
    files = {item.nodeid.partition("::")[0] for item in items}
    gone = [name for name in slow if name not in found and name.partition("::")[0] in files]
    if whole and gone:
        raise pytest.UsageError(f"{SLOW.name} names {gone[0]}, which is no test; correct or remove the line")
    places = {name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


def pytest_collection_finish():
    """Full collections pass over what imports made, a second each once torch is loaded: fewer of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pytest_unconfigure():
    programs = pathlib.Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if "PYTEST_XDIST_WORKER" not in os.environ and programs.name.startswith("jppo-tests-"):
        shutil.rmtree(programs, ignore_errors=True)


@pytest.fixture(autouse=True)
def room_for_programs():
    """Forgets compiled programs before XLA crashes: each has maps of memory, and Linux allows a process 65,530."""
    began = time.monotonic()
    yield
    compiled = time.monotonic() - began > 0.2  # reading the maps takes longer than most tests
    if compiled and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def shared():
    """The folder of real models and data beside the checkout; tests that use it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED}: real models and data are not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """An HF directory of the quickstart's qwen2 shape: random weights and a tokenizer; to be read only."""
    root = tmp_path_factory.mktemp("tiny_model")
    arithmetic.write_model(root / "source")
    _, cfg = hf.read_config(root / "source")
    values = decoder.init_params(cfg, jax.random.key(0), head="lm", param_dtype="float32")
    return hf_write.save_model(root / "hf", values, cfg, source=root / "source", dtype="float32")


def with_paths():
    """The defaults with the paths that have none."""
    c = settings.default()
    c.model.path, c.data.train_files, c.data.val_files = "some/model", "train.jsonl", "val.jsonl"
    return c


@pytest.fixture
def config():
    """The defaults with the paths that have none."""
    return with_paths()


@pytest.fixture(autouse=True)
def quick_compilation():
    """XLA does not try hard: small models run a few times only. Commands that tests start compile as a user's do."""
    before = jax.config.read(QUICK)
    jax.config.update(QUICK, True)
    yield
    jax.config.update(QUICK, before)


class RandomEngine:
    """An engine that answers at random, at once, and remembers what it was asked for."""

    def __init__(self):
        self.asked = []
        self.adapters, self.folder = [], None

    def ready(self, *, eos_token_ids, decode, talk=None):
        self.end, self.decode = eos_token_ids[0], decode
        return self

    def generate(self, prompts, sampling, *, version, done=None):
        rng = np.random.default_rng(sampling.seed)
        self.asked.append(sampling)
        out = []
        for prompt in (p for p in prompts for _ in range(sampling.n)):
            response = np.append(rng.integers(2, 12, rng.integers(1, sampling.max_tokens)), self.end)
            sampled = np.repeat([False, True], [len(prompt.ids), len(response)])
            how = dict(logprob=rng.normal(-3.3, 0.5, len(sampled)), version=version, text=self.decode(response[:-1]))
            out.append(trajectory(np.concatenate([prompt.ids, response]), sampled, prompt.uid, **how))
            if done is not None:
                done(len(out) - 1, out[-1])
        return out

    def start(self, prompts, sampling, *, done=None, only=None):
        future = Future()
        wanted = range(len(prompts) * sampling.n) if only is None else only
        everything = self.generate(prompts, sampling, version=self.version)
        for number in wanted:
            done(number, everything[number])
        future.set_result([everything[number] for number in wanted])
        return future

    def probe(self, prompts, sampling):
        return type(self).generate(self, prompts, sampling, version=self.version)

    def load_adapter(self, save, *, version, mode="wait"):
        self.version = version
        self.adapters.append((version, save(self.folder / f"adapter-{version}")))

    def load(self, tensors, *, version, mode="wait"):
        self.version = version
        assert all(np.isfinite(array).all() for _, array in tensors)

    def sleep(self):
        pass

    def metrics(self):
        return {}

    def close(self):
        pass


@pytest.fixture
def engine(monkeypatch):
    """The random engine in the place of vLLM; the start_engine of jppo reads the settings of the server."""
    made = RandomEngine()
    monkeypatch.setattr(rollout, "start_vllm", lambda *_, **__: made)
    return made


@pytest.fixture
def small_run(config, engine, tmp_path):
    """Two steps of the arithmetic task with a model of one layer; the engine answers at random."""
    return write_small_run(config, tmp_path)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The config of `small_run` after training; tests copy its folder and change nothing in it."""
    from jppo import train

    c, before = write_small_run(with_paths(), tmp_path_factory.mktemp("finished")), jax.config.read(QUICK)
    c.critic.value_head_std = 0.2  # else its steps of equal scores have no gradient
    jax.config.update(QUICK, True)  # set up before quick_compilation is
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "start_vllm", lambda *_, **__: RandomEngine())
        train.train(c)
    jax.config.update(QUICK, before)
    return c


def write_small_run(config, tmp_path):
    """Writes data and model of two steps of the arithmetic task; fills in the config."""
    made = arithmetic.make(seed=0, test=4, sloppy=0.5, demonstrations=1)
    files = [str(write_lines(tmp_path / f"{name}.jsonl", made[name][:8])) for name in ("train", "test")]
    arithmetic.write_model(tmp_path / "model")
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    (tmp_path / "model/config.json").write_text(json.dumps(arithmetic.MODEL | shape))
    config.model.path, config.model.init = str(tmp_path / "model"), "random"
    config.data.train_files, config.data.val_files = files
    config.data.train_batch_size, config.actor.ppo_mini_batch_size = 4, 4
    config.data.max_prompt_length, config.data.max_response_length, config.data.row_lengths = 8, 6, 1
    config.trainer.run_dir, config.rollout.logp_tolerance = str(tmp_path / "run"), 100.0
    config.trainer.total_training_steps, config.trainer.test_freq, config.trainer.save_freq = 2, 1, 1
    settings.check(config)
    return config
