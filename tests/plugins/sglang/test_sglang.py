"""SGLang's engine against `fake_sglang.py`, real processes that speak its HTTP interface; no real SGLang is run."""

import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from jppo import train
from jppo.errors import UserError
from jppo.models import hf
from jppo.plugins.sglang import client
from jppo.plugins.sglang.client import GENERATE, RESERVED_OPTIONS, Sglang, check_sglang, sglang_options, start_sglang
from jppo.rollout.protocol import RolloutError, greedy
from jppo.rollout.servers import replies
from jppo.rollout.servers.endpoint import Endpoint, ServerFault
from jppo.run.inputs import read_inputs, read_test, require_publishable
from jppo.settings import check
from jppo.types import Prompt
from tests.make import typed
from tests.models.conftest import config_of
from tests.plugins.sglang import fake_sglang
from tests.plugins.sglang.fake_sglang import EMBED, HEAD

VOCAB, WIDTH, END = 12, 5, 11
SAMPLING = dataclasses.replace(greedy(9), temperature=0.8, n=3, seed=5)
PROMPTS = [Prompt(f"p{i}", "", "", np.array([3, i], np.int32), "", {}) for i in range(4)]


def weights(seed):
    rng = np.random.default_rng(seed)
    return {
        EMBED: rng.normal(size=(VOCAB, WIDTH)).astype(np.float32),
        HEAD: rng.normal(size=(VOCAB, WIDTH)).astype(np.float32),
    }


def log_probs(tensors, last, temperature):
    """By the definition, in double precision."""
    scaled = [float(row.astype(float) @ tensors[EMBED][last].astype(float)) / temperature for row in tensors[HEAD]]
    return np.array(scaled) - np.log(sum(np.exp(scaled)))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An interpreter that has the stand-in for SGLang, and numpy."""
    root = tmp_path_factory.mktemp("sglang")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(root)], check=True)
    site = next(root.glob("lib/python3*/site-packages"))
    (site / "numpy.pth").write_text(str(pathlib.Path(np.__file__).parents[1]))
    (site / "sglang").mkdir()
    (site / "sglang/__init__.py").write_text("")
    (site / "sglang/launch_server.py").write_text(pathlib.Path(fake_sglang.__file__).read_text())
    (site / "sglang/srt/entrypoints").mkdir(parents=True)
    (site / "sglang/srt/entrypoints/http_server.py").write_text("from sglang.launch_server import App\napp = App()\n")
    (site / "sglang-0.5.9.dist-info").mkdir()
    (site / "sglang-0.5.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.9\n")
    return str(root / "bin/python")


@pytest.fixture
def start(python, settings, tmp_path):
    """A maker of samplers over started servers."""
    engines = []
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps({"eos_token_id": END}))

    def make(servers=1, urls=(), ready=True, health_s=60.0, **changes):
        engines.append(
            start_sglang(
                str(tmp_path / "model"),
                str(tmp_path / "run"),
                settings=settings(
                    python=python,
                    servers=servers,
                    max_model_len=11,
                    devices=("0", "1"),
                    request_timeout_s=60.0,
                    health_timeout_s=health_s,
                    max_restarts=2,
                    **changes,
                ),
                urls=urls,
            )
        )
        return engines[-1].ready(eos_token_ids=[END], decode=str) if ready else engines[-1]

    yield make
    for engine in engines:
        engine.close()


def facts(trajectories):
    return [(t.tokens.tolist(), t.logprob.tolist(), t.version.tolist(), t.finish) for t in trajectories]


def posted(tmp_path, number=0):
    lines = (tmp_path / f"run/server-{number}.log").read_text().splitlines()
    return [(line.split()[0], json.loads(line.partition(" ")[2])) for line in lines if line.startswith("/")]


def test_samples_are_of_the_published_weights_and_their_log_probs_exact(start, tmp_path):
    sampler = start()
    found = {}
    for version in (1, 2):
        tensors = weights(version)
        sampler.load(iter(tensors.items()), version=version)
        found[version] = sampler.generate(PROMPTS, SAMPLING, version=version)
        assert len(found[version]) == 12
        for t in found[version]:
            (drawn,) = np.nonzero(t.sampled)
            for i in drawn:
                expected = log_probs(tensors, t.tokens[i - 1], 0.8)[t.tokens[i]]
                assert abs(t.logprob[i] - expected) < 1e-5
            assert set(t.version[drawn]) == {version}
            assert t.finish == ("stop" if t.tokens[-1] == END else "length")
            assert t.finish == "stop" or len(drawn) == 9  # no token is lost to the end of the context
    assert {t.finish for t in found[1] + found[2]} == {"stop", "length"}
    assert facts(found[1]) != facts(found[2])
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=2)) == facts(found[2])
    assert len({tuple(t.tokens) for t in found[2]}) > 8  # seeds differ
    sampler.sleep()  # which no level asks for
    steps = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert [route for route, _ in posted(tmp_path) if route != GENERATE] == 2 * steps
    loaded = [body["model_path"] for route, body in posted(tmp_path) if route == steps[1]]
    assert len(set(loaded)) == 2 and not pathlib.Path(loaded[0]).is_relative_to(tmp_path)
    sampler.close()
    assert not pathlib.Path(loaded[0]).parent.exists()


def test_a_server_that_sleeps_wakes_with_the_next_weights(start, tmp_path):
    sampler = start(sleep_level=2)
    sampler.load(weights(1).items(), version=1)
    expected = facts(sampler.generate(PROMPTS, SAMPLING, version=1))
    sampler.sleep()
    sampler.load(weights(1).items(), version=1)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=1)) == expected
    routes = [(route, body.get("tags")) for route, body in posted(tmp_path) if "memory" in route or "update" in route]
    assert routes[1:] == [
        ("/release_memory_occupation", ["kv_cache", "weights"]),
        ("/resume_memory_occupation", ["weights"]),
        ("/update_weights_from_disk", None),
        ("/resume_memory_occupation", ["kv_cache"]),
    ]


def test_bfloat16_and_a_greedy_answer(start):
    import ml_dtypes

    sampler = start()
    tensors = {name: array.astype(ml_dtypes.bfloat16) for name, array in weights(3).items()}
    sampler.load(tensors.items(), version=0)
    (t,) = sampler.generate(PROMPTS[:1], greedy(4, ignore_eos=True), version=0)
    for i in (2, 3, 4, 5):
        expected = log_probs(tensors, t.tokens[i - 1], 1.0)
        assert t.tokens[i] == np.argmax(expected) and abs(t.logprob[i] - expected.max()) < 1e-5


def test_end_tokens_and_stop_texts(start):
    sampler = start()
    tensors = weights(1)
    sampler.load(tensors.items(), version=1)
    plain = sampler.generate(PROMPTS, dataclasses.replace(SAMPLING, ignore_eos=True), version=1)
    assert {t.finish for t in plain} == {"length"} and any(END in t.tokens[2:-1] for t in plain)
    stopped = sampler.generate(PROMPTS, dataclasses.replace(SAMPLING, ignore_eos=True, stop=("b", "ef")), version=1)
    seen = 0
    for one, other in zip(plain, stopped, strict=True):
        text = "".join(chr(97 + token) for token in one.tokens[2:])
        ends = [m.end() for m in re.finditer("b|ef", text)]
        assert other.tokens.tolist() == one.tokens[: 2 + (ends[0] if ends else 9)].tolist()
        assert other.finish == ("stop" if ends else "length")
        seen += bool(ends)
    assert seen


def test_several_servers_share_the_work_and_a_killed_one_comes_back_with_the_same_samples(start, tmp_path):
    alone = start()
    alone.load(weights(4).items(), version=4)
    expected = facts(alone.generate(PROMPTS, SAMPLING, version=4))
    alone.close()
    (tmp_path / "run/server-0.log").unlink()
    sampler = start(servers=2)
    sampler.load(weights(9).items(), version=3)
    sampler.load(weights(4).items(), version=4)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=4)) == expected
    assert all(sum(route == GENERATE for route, _ in posted(tmp_path, i)) == 6 for i in (0, 1))
    os.killpg(sampler.members[1].server.pid, signal.SIGKILL)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=4)) == expected
    deadline = time.monotonic() + 120
    while not (sampler.restarts and all(m.up and not m.in_repair for m in sampler.members)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    told = [body["weight_version"] for route, body in posted(tmp_path, 1) if route == client.LOAD]
    assert told == ["3", "4", "4"]
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=4)) == expected
    assert sum(route == GENERATE for route, _ in posted(tmp_path, 1)) >= 12


def test_a_server_that_stands_still_is_started_again(start):
    sampler = start(health_s=3.0)
    sampler.load(weights(4).items(), version=4)
    expected = facts(sampler.generate(PROMPTS, SAMPLING, version=4))
    process = sampler.members[0].server.pid
    children = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True, check=True).stdout.split()
    os.kill(int(children[0]), signal.SIGSTOP)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=4)) == expected
    assert sampler.restarts == 1


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_an_update_meets_no_answer_under_way(start, monkeypatch, mode):
    monkeypatch.setenv("FAKE_TOKEN_S", "0.2")
    sampler = start()
    old, new = weights(1), weights(2)
    sampler.load(old.items(), version=1)
    going = sampler.start(PROMPTS, dataclasses.replace(SAMPLING, ignore_eos=True))
    time.sleep(0.45)
    sampler.load(new.items(), version=2, mode=mode)
    assert not going.done() or mode == "wait"
    for t in going.result():
        assert len(t.tokens) == 11 and t.finish == "length"
        for i in range(2, 11):
            tensors = {1: old, 2: new}[t.version[i]]
            assert abs(t.logprob[i] - log_probs(tensors, t.tokens[i - 1], 0.8)[t.tokens[i]]) < 1e-5
        assert set(t.version[2:]) == ({1} if mode == "wait" else {1, 2})
    assert sampler.generate(PROMPTS, SAMPLING, version=2)[0].version[-1] == 2


def test_a_publish_that_is_not_the_model_is_refused_before_a_server_hears_of_it(start, tmp_path):
    sampler = start()
    sampler.load(weights(1).items(), version=1)
    before = facts(sampler.generate(PROMPTS, SAMPLING, version=1))
    for wrong, said in [
        ({EMBED: weights(2)[EMBED]}, r"lm_head.weight has shape none instead of \[12, 5\]"),
        (weights(2) | {HEAD: np.zeros((VOCAB, 4), np.float32)}, r"lm_head.weight has shape \[12, 4\]"),
        (weights(2) | {"extra": np.zeros(1, np.float32)}, r"extra has shape \[1\] instead of none"),
    ]:
        with pytest.raises(RolloutError, match=said):
            sampler.load(wrong.items(), version=2)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=1)) == before
    sampler.load(weights(2).items(), version=2)
    assert facts(sampler.generate(PROMPTS, SAMPLING, version=2)) != before
    assert [body["weight_version"] for route, body in posted(tmp_path) if route == client.LOAD] == ["1", "2"]


def test_a_directory_that_the_server_cannot_read_is_an_error_with_its_words(start):
    sampler = start()
    sampler.load(weights(1).items(), version=1)
    path = pathlib.Path(sampler.publisher.whole(weights(2).items(), 2).path)
    (path / client.FILE).write_bytes(b"")
    with pytest.raises(RolloutError, match=r"answered /update_weights_from_disk with 400.*Failed to update weights"):
        sampler.weights.deliver(client.Directory(path=path, version=2))


def test_a_server_is_attached_to_when_it_is_fit(start, monkeypatch):
    own = start(ready=False)
    for server in own.servers:
        server.wait_ready()
    url = own.servers[0].url
    with pytest.raises(UserError, match=r"with 401.*start it with `JPPO_SERVER_TOKEN=.*, and set JPPO_SERVER_TOKEN"):
        start(urls=[url])
    monkeypatch.setenv("JPPO_SERVER_TOKEN", own.servers[0].key.token)
    sampler = start(urls=[url])
    sampler.load(weights(1).items(), version=1)
    assert len(sampler.generate(PROMPTS, SAMPLING, version=1)) == 12
    endpoint = Endpoint(url, timeout_s=5.0, explain=str, key=own.servers[0].key)
    endpoint.post("/pause_generation", {"mode": "in_place"})
    with pytest.raises(
        UserError, match=r"is paused.*curl -X POST .*/continue_generation -H 'Content-Type: application"
    ):
        start(urls=[url])
    endpoint.post("/continue_generation", {})
    with pytest.raises(UserError, match="are addresses of one server; name it once"):
        start(urls=[url, url.replace("127.0.0.1", "localhost")])
    with pytest.raises(RolloutError, match=r"unknown: .*'temprature'"):  # the stand-in sees misspelt fields
        endpoint.post(GENERATE, {"input_ids": [1], "sampling_params": {"temprature": 1.0}})
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(
            UserError, match=r"broke off /health.*start it with `JPPO_SERVER_TOKEN=.* SGLANG_.*sglang\.guarded"
        ):
            start(urls=[f"http://127.0.0.1:{closed.getsockname()[1]}"])


def test_what_the_servers_are_started_with(settings, python, tmp_path):
    given = sglang_options(settings(engine_args="--attention-backend triton"))
    assert given[-2:] == ["--attention-backend", "triton"] and "--enable-deterministic-inference" in given
    assert given[given.index("--context-length") + 1] == "66"
    assert "--disable-cuda-graph" not in sglang_options(settings(enforce_eager=False))
    for option in RESERVED_OPTIONS:
        with pytest.raises(UserError, match="is set by"):
            sglang_options(settings(engine_args=f"{option} 1"))
    assert check_sglang(python) == "0.5.9"
    with pytest.raises(UserError, match=r"SGLang is not installed for .*pip install 'sglang>=.*rollout\.python"):
        check_sglang(sys.executable)
    with pytest.raises(UserError, match="does not run"):
        check_sglang("false")


def reply(tokens, finish, **meta):
    said = [[-0.5, token, None] for token in tokens]
    return {"meta_info": {"finish_reason": finish, "output_token_logprobs": said, "weight_version": "3"} | meta}


def read(speaks, answer):
    with replies.reading("SGLang", answer):
        return speaks.parse_reply(answer, SAMPLING)


def test_answers_that_cannot_be():
    speaks = Sglang([END], VOCAB, "how")
    part = speaks.parse_reply(reply([4, END], {"type": "stop", "matched": END}), SAMPLING)
    assert (part.tokens, part.version, part.finish) == ([4, END], ["3", "3"], "stop")
    unbegun = {"meta_info": {"finish_reason": {"type": "abort", "message": "Abort before prefill"}}}
    assert speaks.parse_reply(unbegun, SAMPLING).tokens == []
    for wrong in (
        {},
        [],
        reply([], {"type": "length"}),
        reply([4], {"type": "tool"}),
        reply([4], None),
        reply([4], {"type": "stop", "matched": END}),
        reply([4], {"type": "stop", "matched": "NaN happened"}),
        reply([4], {"type": "length"}, output_token_logprobs=[[None, 4, None]]),
        reply([4], {"type": "length"}, output_token_logprobs=[[float("-inf"), 4, None]]),
    ):
        with pytest.raises(ServerFault):
            read(speaks, wrong)
    with pytest.raises(UserError, match="at token 4, which is no end token here; add it to eos_token_id"):
        speaks.parse_reply(reply([4], {"type": "stop", "matched": 4}), SAMPLING)
    further = dataclasses.replace(SAMPLING, stop_ids=(4,))
    assert speaks.request([1], further, 0, "")[1]["sampling_params"]["stop_token_ids"] == [END, 4]
    assert speaks.parse_reply(reply([4], {"type": "stop", "matched": 4}), further).finish == "stop"
    with pytest.raises(UserError, match="SGLang ignores these tokens too"):
        speaks.request([1], dataclasses.replace(further, ignore_eos=True), 0, "")


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("lora_sync", "adapter", "take rollout.lora_sync=merge"),
        ("on_update", "keep", "take wait or abort"),
        ("top_p", 0.9, "leave top_p out"),
        ("min_p", 0.1, "leave min_p out"),
    ],
)
def test_what_sglang_cannot_do_is_refused(config, name, value, said):
    config.rollout.name, config.rollout.mode = "sglang", "async"
    check(config)
    config.rollout[name] = value
    with pytest.raises(UserError, match=said):
        check(config)


UNTRIED = {
    "mixtral-full": "experts of a mixtral",
    "gpt-oss-clamped": "experts of a gpt_oss",
    "qwen3-next-periods": "experts and gated delta nets of a qwen3_next",
    "deepseek2-lite": "experts and latent attention of a deepseek_v2",
    "olmo2-grouped": None,
}


@pytest.mark.parametrize("name", UNTRIED)
def test_models_that_sglang_was_not_tried_with_are_refused_before_anything_starts(config, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    config.model.path, config.model.init, config.rollout.name = str(tmp_path), "random", "sglang"
    if UNTRIED[name] is None:
        require_publishable(typed(config), hf.read_config(str(tmp_path))[1])
        return
    with pytest.raises(UserError, match=f"publishing {UNTRIED[name]} model to SGLang is untested.*vllm or inprocess$"):
        require_publishable(typed(config), hf.read_config(str(tmp_path))[1])
    config.rollout.name = "vllm"
    require_publishable(typed(config), hf.read_config(str(tmp_path))[1])


@pytest.mark.parametrize("read", [read_inputs, read_test])
def test_a_run_reads_that_its_model_cannot_be_published(small_run, read):
    config = dict(config_of("mixtral-full"), vocab_size=64)  # room for the tokenizer's
    (pathlib.Path(small_run.model.path) / "config.json").write_text(json.dumps(config))
    small_run.rollout.name = "sglang"
    with pytest.raises(UserError, match="publishing experts of a mixtral model to SGLang is untested"):
        read(typed(small_run))
    small_run.rollout.name = "vllm"
    assert read_inputs(typed(small_run)).policy.family == "mixtral"


def test_a_training(small_run, python, quick_compilation):
    small_run.rollout.name, small_run.rollout.python = "sglang", python
    small_run.trainer.test_freq, small_run.trainer.save_freq, small_run.trainer.total_training_steps = -1, -1, 1
    small_run.algorithm.adv_estimator = "reinforce_plus_plus"  # without a critic, which is quicker
    check(small_run)
    train.train(small_run)
    run = pathlib.Path(small_run.trainer.run_dir)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("reward_mean" in step for step in steps) == 1
    loads = [
        json.loads(line.partition(" ")[2])
        for line in (run / "server-0.log").read_text().splitlines()
        if line.startswith(client.LOAD)
    ]
    assert [body["weight_version"] for body in loads] == ["0", "1"]


def test_a_quantised_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(UserError, match=r"plain weights only; set rollout\.name=vllm$"):
        start_sglang(str(tmp_path), "run", settings=None, urls=["u"])
