"""A real vLLM that trainers attach to: however one ends, the server samples again, for the next one only."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest

from jppo.errors import UserError
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.vllm import publish
from jppo.rollout.vllm.client import Vllm, start_vllm
from tests.rollout.test_real_vllm import PROMPTS, SAMPLING, gap, make_model, random_weights

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make setup"),
]


@pytest.fixture(scope="module")
def server(settings, tmp_path_factory):
    """A server whose leases last four seconds: its config, its endpoint, which is no trainer's, and its settings."""
    folder = tmp_path_factory.mktemp("leased")
    config, how = (
        make_model(folder / "model", "tied"),
        settings(
            max_model_len=384, start_timeout_s=240.0, request_timeout_s=60.0, health_timeout_s=5.0, max_restarts=0
        ),
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(guard, "MIDDLEWARE", "tests.rollout.short_lease.Guard")
        engine = start_vllm(str(folder / "model"), str(folder / "run"), settings=how, urls=[])
    try:
        sampler = engine.ready(eos_token_ids=[2], decode=str)
        yield config, sampler.members[0].endpoint, how, engine.servers[0].key.token
    finally:
        engine.close()


@pytest.fixture
def attach(server, monkeypatch):
    """A maker of engines that are attached to the server."""
    _, endpoint, how, token = server
    monkeypatch.setenv(guard.TOKEN, token)
    made = []

    def make(**changes):
        attached = dataclasses.replace(how, max_restarts=3, **changes)
        made.append(start_vllm("model", "run", settings=attached, urls=[endpoint.url]))
        return made[-1].ready(eos_token_ids=[2], decode=str)

    yield make
    for engine in made:
        engine.close()


def paused(endpoint):
    return endpoint.get("/is_paused")["is_paused"]


KILLED = """
import dataclasses, json, sys, threading, time
import numpy as np
from jppo.rollout.protocol import greedy
from jppo.rollout.vllm import publish
from jppo.rollout.servers.member import ServerSettings
from jppo.rollout.vllm.client import start_vllm
from jppo.types import Prompt
from tests.rollout.test_real_vllm import PROMPTS
url, settings, mode, file = json.loads(sys.argv[1])
how = ServerSettings(**settings | {"request_timeout_s": 300.0})
sampler = start_vllm("model", "run", settings=how, urls=[url]).ready(
    eos_token_ids=[2], decode=str
)
tensors = dict(np.load(file))
sampler.load(tensors.items(), version=1)
under_way = sampler.start(PROMPTS, dataclasses.replace(greedy(80), ignore_eos=True))
def take(self, endpoint):
    print("paused", flush=True)
    time.sleep(1000)
publish.Whole.take = take
sampler.load(tensors.items(), version=2, mode=mode)
"""


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
def test_the_pause_of_a_killed_trainer_ends_and_the_next_one_trains(server, attach, tmp_path, mode):
    import numpy as np

    config, endpoint, how, token = server
    model, tensors = random_weights(config, 1)
    np.savez(tmp_path / "w.npz", **tensors)
    told = json.dumps([endpoint.url, dataclasses.asdict(how), mode, str(tmp_path / "w.npz")])
    env = os.environ | {guard.TOKEN: token}
    trainer = subprocess.Popen([sys.executable, "-c", KILLED, told], env=env, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout.readline() == "paused\n"
    time.sleep(6.0)
    assert paused(endpoint), "a living trainer renews its lease"
    trainer.kill()
    trainer.communicate()
    began = time.monotonic()
    while paused(endpoint):
        assert time.monotonic() - began < 10
        time.sleep(0.1)
    sampler = attach()
    sampler.load(tensors.items(), version=1)
    assert gap(model, sampler.generate(PROMPTS, SAMPLING, version=1)) < 1e-3


@pytest.mark.parametrize("mode", ["wait", "abort", "keep"])
@pytest.mark.parametrize("end", ["refused", "stopped"])
def test_an_orderly_end_in_the_first_publish_resumes_the_server(server, attach, monkeypatch, mode, end):
    config, endpoint, _, _ = server
    model, tensors = random_weights(config, 1)
    sampler = attach()

    def take(self, at):
        assert paused(endpoint)
        if end == "stopped":
            raise KeyboardInterrupt
        publish.require_ok(at, self.version, "jppo_load", version=self.version, path="/another")

    with monkeypatch.context() as broken, pytest.raises((RolloutError, KeyboardInterrupt)):
        broken.setattr(publish.Whole, "take", take)
        sampler.load(tensors.items(), version=1, mode=mode)
    sampler.close()
    assert not paused(endpoint)
    monkeypatch.setattr(guard, "TRAINER", f"next-{mode}-{end}")  # the lease was given back
    sampler = attach()
    sampler.load(tensors.items(), version=1)
    assert gap(model, sampler.generate(PROMPTS, SAMPLING, version=1)) < 1e-3


def test_a_second_trainer_is_refused_with_a_sentence(server, attach, monkeypatch):
    config, _, _, _ = server
    first, (model, tensors) = attach(), random_weights(config, 1)
    first.load(tensors.items(), version=1)
    with monkeypatch.context() as second:
        second.setattr(guard, "TRAINER", "second")
        second.setattr(guard, "LEASE_S", 6.0)  # that it waits
        with pytest.raises(UserError, match=rf"with 409.*in use by the trainer {os.uname().nodename}-{os.getpid()}-"):
            attach()
    assert gap(model, first.generate(PROMPTS, SAMPLING, version=1)) < 1e-3


def test_one_response_longer_than_the_timeout_and_a_queue_at_the_server_are_waited_for(server, attach, monkeypatch):
    config, _, how, _ = server
    sampler = attach(health_timeout_s=60.0, max_concurrent_requests=64)
    sampler.load(random_weights(config, 1)[1].items(), version=1)
    [member], ask_workers, answers = sampler.members, Vllm.working, []

    def working(api, endpoint, requests):
        """The workers' own answer, but not while requests are on their way there or responses on their way back."""
        while True:
            answers.append(ask_workers(api, endpoint, requests))
            if answers[-1] or all(request.done() for request in tuple(member.requests)):
                return answers[-1]
            time.sleep(0.01)

    monkeypatch.setattr(Vllm, "working", working)

    def sampled(prompts, sampling):
        """Samples again if no question came while the server sampled, as on a busy machine."""
        answers.clear()
        for _ in range(20):
            trajectories = sampler.generate(prompts, sampling, version=1)
            if True in answers:
                return trajectories
        raise AssertionError(f"the workers never said that they sample: {answers}")

    member.endpoint.timeout_s = 0.01  # each response is late
    assert how.max_num_seqs == 8
    many = dataclasses.replace(SAMPLING, max_tokens=80, ignore_eos=True, n=10)
    assert len(sampled(PROMPTS, many)) == 40
    slow = dataclasses.replace(SAMPLING, max_tokens=370, ignore_eos=True, n=1)
    [t] = sampled([dataclasses.replace(PROMPTS[0], ids=PROMPTS[0].ids[:8])], slow)
    assert len(t.tokens) == 378
    assert sampler.metrics() == {"rollout/servers": 1.0, "rollout/restarts": 0.0, "rollout/asked_again": 0.0}
