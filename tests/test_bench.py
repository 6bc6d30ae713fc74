"""benchmarks/: the FLOP by hand, the batches, the reports, and a tiny model for real."""

import gzip
import json
import os
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.learner.make import make_mesh
from jppo.models import config_reader, lora
from tests import make
from tests.make import typed


def script(name):
    return make.script(f"benchmarks/{name}.py")


@pytest.fixture(scope="module", autouse=True)
def beside():
    """Scripts find each other when they run, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(make.ROOT / "benchmarks")
        yield


@pytest.fixture(scope="module")
def work(beside):
    return script("work")


@pytest.fixture
def tiny(work):
    """2 layers, width 8, MLP 12, 2 heads of 4, 1 key/value head, vocabulary 10."""
    return config_reader.parse_config(work.hf_config(2, 8, 12, 2, 1, 10), path="here")


def test_flops_by_hand(work, tiny):
    """Of 3 + 2 tokens; tests/learner/test_cost.py counts other models product by product."""
    # Weights of a layer: q and o 8*8, k and v 8*4, three of the MLP 8*12; 480. A product and a sum for each.
    dense = 2 * 2 * 5 * 480
    # Token t sees t keys: 1+2+3+4+5 = 15 pairs; each is a product with k and one with v, of 8 = 2 heads of 4.
    attention = 2 * 2 * 15 * (8 + 8)
    head = 2 * 2 * 8 * 10  # the 2 tokens of the response
    assert work.forward_flops(tiny, [2], prompt=3, lm_head=True) == dense + attention + head
    assert work.forward_flops(tiny, [2, 2], prompt=3, lm_head=False) == 2 * (dense + attention)
    # Rank 2, A and B: q and o 8*2 + 2*8, k and v 8*2 + 2*4, gate and up 8*2 + 2*12, down 12*2 + 2*8; 232 a layer.
    how = lora.Lora(2, 16.0, lora.parse_targets("all-linear"))
    found = work.lora_update_flops(tiny, how, [2], prompt=3)
    assert found == 2 * dense + 3 * attention + 2 * head + 3 * 2 * 2 * 5 * 232
    flops = work.stage_flops(tiny, [2, 5])
    assert flops["logprobs"] == work.forward_flops(tiny, [2, 5], prompt=64, lm_head=True)
    assert flops["actor"] == 3 * flops["logprobs"] and flops["update"] == flops["actor"] + flops["critic"]
    assert flops["critic"] == flops["actor"] - 3 * 2 * 7 * 8 * 10


def test_the_batch_is_ragged_and_always_the_same(work, tiny):
    responses = work.response_lengths()
    assert responses.shape == (64,) and responses.min() >= 16 and responses.max() <= 128
    np.testing.assert_array_equal(responses, work.response_lengths())
    trajectories = work.make_batch(tiny, responses)
    assert sum(len(t.tokens) for t in trajectories) == 64 * 64 + responses.sum() == 8772
    assert [int(t.sampled.sum()) for t in trajectories] == responses.tolist()
    assert all(not t.sampled[:64].any() and t.sampled[64:].all() for t in trajectories)
    assert all(t.tokens.min() >= 1 and t.tokens.max() < 10 for t in trajectories)


def test_settings_can_be_changed_and_are_checked():
    models = script("models")
    c = models.make_config("model", "bfloat16", ["data.row_lengths=2", "data.packing=none"])
    assert (c.data.row_lengths, c.data.packing) == (2, "none")
    assert c.model.compute_dtype == c.rollout.dtype == "bfloat16"
    for wrong in ("data.row_length=2", "data.row_lengths=two", "data.row_lengths=0", "data"):
        with pytest.raises(UserError):
            models.make_config("model", "float32", [wrong])


def test_the_mismatch_by_hand():
    """Ratios of 0.79, 0.81, 1.27 and 1.29: two are outside of 0.8 to 1.28."""
    found = script("mismatch").summarise(np.log([0.79, 0.81, 1.27, 1.29]), (0.8, 1.28))
    assert (found["tokens"], found["out_of_band"]) == (4, 0.5)
    np.testing.assert_allclose(found["mean"], (-np.log(0.79) - np.log(0.81) + np.log(1.27) + np.log(1.29)) / 4)
    np.testing.assert_allclose(found["largest"], np.log(1.29))


def test_a_machine_has_no_name_of_its_own():
    machine = script("machine")
    found = {"cpu": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 2, "device": "cpu", "devices": 1}
    assert machine.slug(found) == "intel-xeon-cpu-2-20ghz-2-cores"
    assert machine.slug(found | {"device": "NVIDIA H200", "devices": 8}) == "8-nvidia-h200"


WRONG = {
    "models": ("--models=S,XL", "--models=S --repeats=0", "--models=S --tokens=0", "--models=S --length=1"),
    "memory": ("--models=XL",),
    "mismatch": ("--model=none --data=none", "--model=none --data=none --engine=int8"),
    "rollout": ("--models=XL", "--repeats=0", "--models=S --sample=q05"),
    "contest": ("--shapes=XL", "--shapes=S --dtypes=int8", "--shapes=S --peers=verl", "--shapes=S --repeats=0",
                "--shapes=S --envs=none"),
    "quickstart": ("--profiled=0", "--steps=3 --profiled=3", "--run=none"),
    "gpu": ("--parts=pallas", "--seconds=1"),
    "grpo": ("--steps=1", "--python=none", "--run=none --python=/bin/sh", "--python=/bin/sh --micro_batch=0"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_command_is_one_line(name, capsys):
    for words in WRONG[name]:
        make.one_line(capsys, script(name).main, *words.split())


@pytest.fixture
def models(monkeypatch):
    """The script with one model of one layer."""
    models = script("models")
    monkeypatch.setattr(models, "MODELS", {"tiny": models.hf_config(1, 8, 12, 2, 1, 16)})
    return models


def test_a_part_of_the_batch_is_whole_sequences(models):
    responses = np.asarray([16, 40, 70])  # of 80, 104, 134 tokens with their prompts
    for tokens, sequences in ((None, 3), (318, 3), (317, 2), (184, 2), (183, 1), (80, 1), (1, 1)):
        assert models.some(responses, tokens).tolist() == responses[:sequences].tolist()


def test_the_passes_of_a_model_are_measured_by_the_trainers_own_functions(models):
    measured = models.measure("tiny", models.make_config("tiny", "float32", []), np.asarray([16] * 8), repeats=1)
    assert len(measured["passes"]) == 4 and not measured["left_out"]
    assert all(x["tokens"] == 8 * 80 and len(x["seconds"]) == 1 for x in measured["passes"].values())


def test_a_pass_that_runs_out_of_memory_is_left_out_and_said(models, monkeypatch, capsys):
    def full(s, **_):
        raise models.jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    for name in ("logprobs", "updated"):
        monkeypatch.setattr(models, name, full)
    monkeypatch.setattr(models, "forward", lambda s: {"seconds": [1.0]})
    measured = models.measure("tiny", models.make_config("tiny", "float32", []), np.asarray([16]), repeats=1)
    assert list(measured["passes"]) == ["hidden states"] and set(measured["left_out"].values()) == {
        "it ran out of memory"
    }
    assert "tiny: log-probs it ran out of memory" in capsys.readouterr().err


def test_models_by_default_have_the_numbers_they_are_known_by():
    models = script("models")
    parameters = {}
    for name in ("q15", "q7"):
        cfg = config_reader.parse_config(models.MODELS[name], path=name)
        what = models.state.model_weights(cfg, make_mesh(models.make_config(name, "float32", [])), head="lm",
                                    param_dtype="float32")  # fmt: skip
        parameters[name] = sum(x.size for x in models.jax.tree.leaves(what.shapes))
    assert parameters == {"q15": 1_543_714_304, "q7": 7_615_616_512}  # as their cards count them
    cfg = config_reader.parse_config(models.QWEN, path="q05")
    assert (cfg.head_dim, cfg.qkv_bias, cfg.tie_word_embeddings) == (64, True, True)
    c = models.make_config("q05", "float32", [])
    what = models.state.model_weights(cfg, make_mesh(typed(c)), head="lm", param_dtype="float32")
    assert sum(x.size for x in models.jax.tree.leaves(what.shapes)) == 494_032_768  # as its card counts them
    assert c.model.scan_layers and not models.make_config("M", "float32", []).model.scan_layers


def test_one_post_asks_for_what_the_requests_ask_for():
    how = {"n": 1, "seed": 5, "temperature": 0.5, "max_tokens": 9, "ignore_eos": True, "logprobs": 0}
    how["detokenize"] = False
    bodies = [{"model": "m", "token_ids": [i, i + 1], "sampling_params": how | {"seed": i}} for i in (3, 4)]
    body = script("rollout").as_one_post(bodies)
    assert body.pop("prompt") == [[3, 4], [4, 5]] and body.pop("return_token_ids")
    assert body == {"model": "m", "seed": 3, "temperature": 0.5, "max_tokens": 9, "ignore_eos": True, "logprobs": 0}


def test_the_table_of_grpo_has_medians_without_the_first_step_of_each_round():
    grpo = script("grpo")
    steps = [{"gen": 90.0, "step": 100.0}, {"gen": 1.0, "step": 16.0}, {"gen": 3.0, "step": 32.0}, {"step": 64.0}]
    rounds = [{"steps": steps[:2], "rewards": [0.25], "peak": 2**29}]
    rounds.append({"steps": [steps[0], *steps[2:]], "rewards": [0.5], "peak": 3 * 2**29})
    machine = {"cpu": "x", "cores": 2, "device": "cpu", "devices": 1}
    result = {"machine": machine, "commit": "c", "date": "d", "load_average": 0.0, "task": "sums"}
    text = grpo.table(result | {"work": {"responses": 64}, "contestants": {"jppo": rounds}})
    assert "sums, seconds per step of 64 responses" in text
    assert text.splitlines()[-1] == "| jppo | 2.0 |  |  |  |  |  | 32.0 | 2.00 | 1.5 | 0.375 |"


def test_the_memory_of_a_process_is_that_of_its_children_too():
    grpo = script("grpo")
    sleeper = "import subprocess; subprocess.run(['sleep', '30'])"
    with subprocess.Popen([sys.executable, "-c", sleeper]) as process:
        make.until(lambda: len(grpo.descendants(process.pid)) == 2)
        child = max(grpo.descendants(process.pid) - {process.pid})
        assert 2**20 < grpo.memory(process.pid) < 2**27 and grpo.memory(child) < grpo.memory(process.pid)
        os.kill(child, signal.SIGKILL)
        process.kill()


@pytest.fixture
def contest():
    return script("contest")


def entered(peer, dtype, logprobs, update, allocator="default"):
    """A contestant with the seconds of its rounds."""
    seconds = {"logprobs": logprobs} | ({"update": update} if update else {})
    return {"peer": peer, "dtype": dtype, "allocator": allocator, "seconds": seconds}


def test_a_ratio_is_of_the_same_round_and_against_the_peer_that_comes_nearest(contest):
    everyone = {
        "jppo float32": entered("jppo", "float32", [1.0, 4.0, 1.0], [2.0, 2.0, 2.0]),
        "jppo bfloat16": entered("jppo", "bfloat16", [0.5, 0.5, 0.5], [3.0, 3.0, 3.0]),
        "torch float32": entered("torch", "float32", [3.0, 8.0, 3.0], [5.0, 6.0, 7.0]),
        "torch float32 jemalloc": entered("torch", "float32", [2.0, 9.0, 2.0], [5.0, 5.0, 50.0], "jemalloc"),
        "trl bfloat16": entered("trl", "bfloat16", [1.0, 1.0, 1.0], None),
    }
    found = contest.ratios({"contestants": everyone})
    assert found["float32"]["logprobs"] == {"jppo": "jppo float32", "peer": "torch float32 jemalloc", "ratio": 2.0}
    assert found["float32"]["update"] == {"jppo": "jppo float32", "peer": "torch float32 jemalloc", "ratio": 2.5}
    assert found["bfloat16"] == {"logprobs": {"jppo": "jppo bfloat16", "peer": "trl bfloat16", "ratio": 2.0}}
    assert found["best"]["logprobs"]["ratio"] == 2.0 and found["best"]["update"]["jppo"] == "jppo float32"


@pytest.fixture
def small_contest(contest, monkeypatch):
    monkeypatch.setitem(contest.SHAPES, "tiny", (1, 8, 12, 2, 1, 16))
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    return contest


@pytest.mark.slow
def test_contestants_are_given_the_same_batch_and_jppo_answers(small_contest, tmp_path):
    about = small_contest.write_work(tmp_path, "tiny", ["data.row_lengths=1"])
    assert about["tokens"] == 8772 and about["flops"]["update"] == about["flops"]["actor"] + about["flops"]["critic"]
    batch = np.load(tmp_path / "batch.npz")
    assert batch["tokens"].shape == (64, 192) and (batch["tokens"] > 0).sum() == 8772
    env = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    who = {"peer": "jppo", "dtype": "float32", "python": small_contest.sys.executable, "env": env}
    broken = {"torch float32": who | {"peer": "torch", "python": "/bin/false"}}
    with small_contest.workers({"jppo float32": who} | broken, tmp_path) as (able, said, left_out):
        assert list(able) == ["jppo float32"] and left_out == {"torch float32": "exit code 1"}
        result = {"seconds": {}, "checks": {}}
        for stage in ("logprobs", "update", "update"):
            small_contest.note(result, stage, able["jppo float32"].go(stage))
    assert {part: len(x) for part, x in result["seconds"].items()} == dict(logprobs=1, actor=2, critic=2, update=2)
    assert result["seconds"]["update"][1] == result["seconds"]["actor"][1] + result["seconds"]["critic"][1]
    # A random model knows little of 16 words; the clipped loss of an advantage of mean 0 is near 0.
    assert said["jppo float32"]["logp"] == pytest.approx(-np.log(16), abs=0.1)
    assert abs(result["checks"]["update"][0]) < 0.1 and result["checks"]["logprobs"][0] == pytest.approx(
        said["jppo float32"]["logp"], abs=1e-3
    )


def test_a_contestant_that_does_other_work_is_not_measured(contest):
    both = {name: {"dtype": dtype} for name, dtype in (("a", "float32"), ("b", "float32"), ("c", "bfloat16"))}
    contest.agree(both, {"a": {"logp": -2.0}, "b": {"logp": -2.00009}, "c": {"logp": -2.5}})
    for wrong in (-2.0002, float("nan")):
        with pytest.raises(RuntimeError, match="log-prob of b"):
            contest.agree(both, {"a": {"logp": -2.0}, "b": {"logp": wrong}, "c": {"logp": -2.0}})


def test_products_that_overlap_count_once(tmp_path):
    quickstart = script("quickstart")
    assert quickstart.covered([(5.0, 6.0), (0.0, 2.0), (1.0, 3.0), (1.0, 1.5)]) == 4.0
    events = [
        {"ph": "X", "name": "ynn_fusion.3", "ts": 0, "dur": 2e6, "tid": 1},
        {"ph": "X", "name": "dot.7", "ts": 1e6, "dur": 2e6, "tid": 2},
        {"ph": "X", "name": "SlinkyThreadPool::Await", "ts": 0, "dur": 9e6, "tid": 3},
        {"ph": "M", "name": "dot"},
    ]
    file = tmp_path / "a.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert quickstart.product_seconds(file) == 3.0


def test_a_product_is_found_in_the_trace_of_one(tmp_path):
    """The names of events are XLA's; if they change, the share of products would be 0."""
    quickstart = script("quickstart")
    jax = script("models").jax
    multiply = jax.jit(lambda a, b: jax.numpy.tanh(a @ b))
    a = jax.numpy.ones((256, 256))
    jax.block_until_ready(multiply(a, a))
    with jax.profiler.trace(tmp_path):
        jax.block_until_ready(multiply(a, a))
    (file,) = tmp_path.rglob("*.trace.json.gz")
    assert 0 < quickstart.product_seconds(file) < 5


@pytest.fixture
def gpu():
    return script("gpu")


def test_a_part_of_the_gpus_benchmark_writes_its_lines_at_once(gpu, tmp_path):
    gpu.run_part("gae", tmp_path / "lines", tiny=True)
    (line,) = [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()]
    assert (line["part"], line["shape"]) == ("gae", "4x32") and line["ms"] > 0 and "failed" not in line


def test_a_part_of_the_gpus_benchmark_ends_at_its_limit(gpu, tmp_path):
    gpu.run_process("gae", tmp_path / "lines", ["--tiny"], 0.1, dict(os.environ))
    (line,) = [json.loads(text) for text in (tmp_path / "lines").read_text().splitlines()]
    assert line["left_out"] == "the rest: stopped after 0 s"


def test_a_part_without_time_is_left_out_and_failures_are_told(gpu, tmp_path, monkeypatch, capsys):
    clock, given = iter([0.0, 1.0, 90.0, 91.5]), []
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))

    def run(name, file, options, seconds, env):
        given.append((name, options, seconds))
        gpu.append(file, {"part": name, "ms": 1234.5} if name == "ipc" else {"part": name, "failed": "no memory"})

    monkeypatch.setattr(gpu, "run_process", run)
    (tmp_path / "gpu.jsonl").write_text("of an earlier run")
    with pytest.raises(SystemExit, match="1 of 3 measurements failed"):
        gpu.main(["--parts=attention,gae,ipc", "--seconds=106", f"--out={tmp_path}"])
    # The part ipc gets its limit, attention the remaining seconds, gae none.
    assert given == [("ipc", [], gpu.PARTS["ipc"].limit_s), ("attention", [], 16.0)]
    (file,) = tmp_path.iterdir()
    result = json.loads(file.read_text())
    assert [line.get("left_out") for line in result["lines"]] == [None, None, "all: no time was left of 106 s"]
    assert "| part | ms |\n| --- | --- |\n| ipc | 1,234 |\n\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_part_of_the_gpus_benchmark_runs_on_a_cpu(gpu, tmp_path):
    command = [sys.executable, gpu.__file__, "--tiny", "--seconds=1100", f"--out={tmp_path}"]
    env = os.environ | {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    subprocess.run(command, env=env, check=True)
    (file,) = tmp_path.iterdir()
    lines = json.loads(file.read_text())["lines"]
    ended = [line["part"] for line in lines if "process_s" in line]
    assert ended == list(gpu.PARTS)
    left_out = {line["part"]: line["left_out"] for line in lines if "left_out" in line}
    assert set(left_out) == {"ipc", "decode"} and all("GPU" in reason for reason in left_out.values())
    numbers = [line for line in lines if "gradient_apart" in line]
    assert len(numbers) == 2 and all(x["gradient_apart"] < 0.01 and x["nan"] == 0 for x in numbers)
    assert {line["remat"] for line in lines if line.get("stage") == "update"} == {"full", "attention", "dots", "none"}
