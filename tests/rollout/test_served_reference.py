"""The reference on vLLM servers, `ref.url`: exact log-probs, a teacher of each data source, and servers that fail."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from examples import arithmetic
from jppo import settings, train
from jppo.data.tokenizer import load_tokenizer
from jppo.errors import UserError
from jppo.preflight import models_and_data
from jppo.rollout.protocol import RolloutError
from jppo.rollout.vllm import client
from jppo.rollout.vllm.client import SCORE_ROUTE, ServedReferences
from jppo.run.inputs import read_inputs
from jppo.types import Trajectory
from tests.make import typed

TOKENS = [4, 2, 12, 3]


def trajectory(tokens, uid="p1"):
    n = len(tokens)
    tokens = np.array(tokens, np.int32)
    nothing = dict(logprob=np.zeros(n, np.float32), version=np.zeros(n, np.int32), text="", finish="stop", turns=1)
    return Trajectory(uid=uid, tokens=tokens, sampled=np.arange(n) >= 2, **nothing)


def reply(body):
    """As vLLM: nothing for the first token, then each token's own log-prob; here minus its id."""
    return {"choices": [{"prompt_logprobs": [None, *({str(t): {"logprob": -t / 4}} for t in body["prompt"][1:])]}]}


@pytest.fixture
def tokenizer(tmp_path):
    arithmetic.write_model(tmp_path / "tokens")
    return load_tokenizer(str(tmp_path / "tokens"))


@pytest.fixture
def fake(fakes, tokenizer, monkeypatch):
    monkeypatch.setattr(client, "PAUSE_S", 0.0)
    for one in fakes:
        make_teacher(one.answers, tokenizer)
    return fakes[0]


def make_teacher(answers, tokenizer):
    answers["/v1/models"] = (200, {"data": [{"id": "teacher", "max_model_len": 64}]})
    answers["/detokenize"] = (200, lambda body: {"prompt": tokenizer.decode(body["tokens"])})
    answers[SCORE_ROUTE] = (200, reply)


class ForAll:
    """A server for all data sources."""

    def __init__(self, url, **how):
        self.servers = ServedReferences({"": url}, **how)

    def logprobs(self, trajectories):
        return self.servers.logprobs(trajectories, ["a"] * len(trajectories))


def attach(fake, tokenizer, longest=63):
    return ForAll(fake.url, longest=longest, tokenizer=tokenizer, timeout_s=60.0)


def test_every_sequence_has_its_own_log_probs(fake, tokenizer):
    asked = [trajectory([i, *TOKENS]) for i in range(2, 12)]
    found, metrics = attach(fake, tokenizer).logprobs(asked)
    assert [x.tolist() for x in found] == [[0.0, -1.0, -0.5, -3.0, -0.75]] * 10
    assert metrics == {"ref/retries": 0.0}
    sent = [body for body in fake.bodies if body and "prompt" in body]
    assert sorted(body["prompt"][0] for body in sent) == list(range(2, 12))
    assert all(body["model"] == "teacher" and body["prompt_logprobs"] == 0 for body in sent)


def test_a_failed_request_is_repeated_and_counted(fake, tokenizer):
    served, left = attach(fake, tokenizer), [2]

    def flaky(body):
        left[0] -= 1
        return {"choices": []} if left[0] >= 0 else reply(body)

    fake.answers[SCORE_ROUTE] = (200, flaky)
    found, metrics = served.logprobs([trajectory(TOKENS)])
    assert found[0].tolist() == [0.0, -0.5, -3.0, -0.75] and metrics == {"ref/retries": 2.0}


@pytest.mark.parametrize(
    "answer,said",
    [
        ((500, {"error": "out of memory"}), "out of memory"),
        ((200, {"choices": [{"prompt_logprobs": [None, {"2": {"logprob": -1.0}}]}]}), "2 of 4 tokens have log-probs"),
        ((200, lambda body: reply(body | {"prompt": [9, 9, 9, 9]})), "'2' is missing"),
        ((200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", "-9999.0"))), "-9999.0 is no log-prob"),
        ((200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", "NaN"))), "nan is no log-prob"),
        ((200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", "3.5"))), "3.5 is no log-prob"),
        ((200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", '"-3.0"'))), "'-3.0' is no log-prob"),
        ((200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", "true"))), "True is no log-prob"),
        ((200, lambda body: {"choices": reply(body)["choices"] * 2}), "choices must be a list of one, not of 2"),
        ((200, {"choices": [{"prompt_logprobs": None}]}), "answered unexpectedly"),
        ((200, None), "answered unexpectedly"),
    ],
)
def test_a_server_that_goes_on_failing_ends_the_run_by_the_prompts_name(fake, tokenizer, answer, said):
    served = attach(fake, tokenizer)
    fake.answers[SCORE_ROUTE] = answer
    with pytest.raises(RolloutError, match="(?s)no log-probs for prompt p7 after 3 tries.*" + said):
        served.logprobs([trajectory(TOKENS, "p7")])
    assert fake.asked.count(SCORE_ROUTE) == 3


def test_a_server_that_does_not_fit_is_refused_at_the_start(fake, tokenizer):
    with pytest.raises(UserError, match=r"max_model_len=64 must be above .*=64; start it with --max-model-len 65"):
        attach(fake, tokenizer, longest=64)
    fake.answers["/detokenize"] = (200, lambda body: {"prompt": tokenizer.decode(body["tokens"][::-1])})
    with pytest.raises(UserError, match="serve a model with that tokenizer"):
        attach(fake, tokenizer)
    fake.answers["/v1/models"] = (200, {"data": []})
    with pytest.raises(RolloutError, match=r"list index out of range, in .* correct the address"):
        attach(fake, tokenizer)
    fake.answers["/v1/models"] = (404, {})
    with pytest.raises(RolloutError, match=r"^ref\.url: .* start vLLM there, or correct the address"):
        attach(fake, tokenizer)


def test_each_data_source_has_its_own_teacher(fake, fakes, tokenizer):
    other = fakes[1]
    other.answers[SCORE_ROUTE] = (200, lambda body: json.loads(json.dumps(reply(body)).replace("-3.0", "-0.125")))
    urls = {"openai/gsm8k": fake.url, "math": other.url}
    served = ServedReferences(urls, longest=63, tokenizer=tokenizer, timeout_s=60.0)
    asked = [trajectory([i, *TOKENS]) for i in range(2, 12)]
    found, _ = served.logprobs(asked, ["math", "openai/gsm8k", "math", "math", "math"] * 2)
    assert [x[3].tolist() for x in found] == [-0.125, -3.0, -0.125, -0.125, -0.125] * 2
    assert sorted(body["prompt"][0] for body in fake.bodies if body and "prompt" in body) == [3, 8]
    assert str(served) == f"teacher at {fake.url} for openai/gsm8k, teacher at {other.url} for math"


@pytest.mark.parametrize(
    "urls, said",
    [
        ("arithmetic=URL,code=URL", "no training row has this data_source, only arithmetic; leave it out"),
        ("code=URL", "no address for data_source='arithmetic' of the training rows, only for code; add arithmetic="),
    ],
)
def test_teachers_are_held_against_the_rows(small_run, urls, said):
    small_run.ref.url, small_run.algorithm.use_kl_in_reward = urls.replace("URL", "http://127.0.0.1:9"), True
    with pytest.raises(UserError, match=re.escape(said)):
        read_inputs(typed(small_run))


def test_a_step_asks_for_each_sample_by_its_own_data_source(small_run, monkeypatch, quick_compilation):
    """Samples, `n` of each prompt, go to the teacher of the row that their prompt is."""
    file = pathlib.Path(small_run.data.train_files)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row | {"data_source": ("arithmetic", "b")[i % 2]} for i, row in enumerate(rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    right = {row["prompt"]: row["data_source"] for row in rows}
    seen = []

    class Teachers:
        def logprobs(self, trajectories, sources):
            seen.extend(zip([t.uid for t in trajectories], sources, strict=True))
            return [np.zeros(len(t.tokens), np.float32) for t in trajectories], {"ref/retries": 0.0}

    monkeypatch.setattr("jppo.run.start._open_served_reference", lambda *_: Teachers())
    small_run.ref.url = "arithmetic=http://127.0.0.1:9,b=http://127.0.0.1:9"
    small_run.algorithm.use_kl_in_reward, small_run.reward.grader, small_run.rollout.n = True, "arithmetic", 2
    inputs = read_inputs(typed(small_run))
    of_uid = {prompt.uid: right[prompt.messages] for prompt in inputs.train.prompts}
    train.train(small_run)
    assert {source for _, source in seen} == {"arithmetic", "b"}
    assert [source for _, source in seen] == [of_uid[uid] for uid, _ in seen]


def test_the_doctor_asks_the_server_and_the_mesh_has_no_reference(fake, small_run):
    small_run.ref.url, small_run.algorithm.use_kl_in_reward = fake.url, True
    settings.check(small_run)
    inputs = read_inputs(typed(small_run))
    assert inputs.reference is None
    [found] = models_and_data.check_reference_server(typed(small_run), inputs)
    assert (found.verdict, found.found) == ("OK", f"teacher at {fake.url}")


@contextlib.contextmanager
def vllm_server(model, log):
    """The address of a vLLM of that model."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    how = ["--model", str(model), "--port", str(port), "--dtype", "float32", "--max-model-len", "64", "--enforce-eager",
           "--kv-cache-memory-bytes", str(2**27)]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *how]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=env)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 240
    try:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup")
def test_a_run_learns_the_same_from_a_served_teacher(small_run, tmp_path, quick_compilation):
    import torch
    import transformers

    arithmetic.write_model(tmp_path / "teacher")
    for name, spread in (("model", 0.02), ("teacher", 0.2)):
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(tmp_path / name, initializer_range=spread)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        model.save_pretrained(tmp_path / name)
    small_run.model.init = "pretrained"

    def steps(name, **ref):
        c = small_run.copy_and_resolve_references()
        c.update_from_flattened_dict({f"ref.{key}": value for key, value in ref.items()})
        c.rollout.name, c.trainer.run_dir, c.trainer.total_training_steps = "inprocess", str(tmp_path / name), 2
        c.algorithm.adv_estimator, c.algorithm.gamma, c.algorithm.kl_coef = "distill", 0.0, 1.0
        c.algorithm.use_kl_in_reward, c.rollout.n = True, 4
        settings.check(c)
        train.train(c)
        lines = (pathlib.Path(c.trainer.run_dir) / "metrics.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["step"] > 0]

    with vllm_server(tmp_path / "teacher", tmp_path / "vllm.log") as url:
        served = ForAll(url, longest=16, tokenizer=load_tokenizer(str(tmp_path / "teacher")), timeout_s=60.0)
        asked = [trajectory(np.random.default_rng(i).integers(2, 14, 4 + i)) for i in range(12)]
        for t, found in zip(asked, served.logprobs(asked)[0], strict=True):
            ids = torch.tensor(t.tokens[None].astype(np.int64))
            with torch.no_grad():
                right = torch.log_softmax(model(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
            np.testing.assert_allclose(found[1:], right, atol=1e-3)
        by_server = steps("served", url=f"arithmetic={url}")
    on_mesh = steps("mesh", path=str(tmp_path / "teacher"))
    for one, other in zip(by_server, on_mesh, strict=True):
        assert one["ref/retries"] == 0 and "ref/retries" not in other
        assert one["actor/reward_kl_penalty"] == pytest.approx(other["actor/reward_kl_penalty"], abs=1e-3)
        assert one["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=1e-2)
