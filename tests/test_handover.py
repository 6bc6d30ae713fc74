"""The publish of a step: begun beside the critic's update, or after all of it."""

import contextlib
import pathlib
import threading
import types

import pytest

from jppo import train
from jppo.distributed.hosts import ALONE, Hosts
from jppo.learner.trainable import Trainable
from jppo.rollout import make
from jppo.rollout.make import make_publisher, may_overlap
from jppo.rollout.protocol import RolloutError
from tests.make import typed, untimed


def test_servers_get_the_policy_while_the_critic_learns(small_run, engine, monkeypatch, tmp_path):
    loading, meet = engine.load, threading.Barrier(2)
    learn, seen = Trainable.learn, []

    def load(tensors, *, version, mode="wait"):
        if version:
            meet.wait(60)  # both are at work: else this would not be reached before the critic is through
        loading(tensors, version=version, mode=mode)

    def learning(how, *rest, **named):
        seen.append(how.name)
        if how.name == "critic":
            meet.wait(60)
        return learn(how, *rest, **named)

    monkeypatch.setattr(engine, "load", load)
    monkeypatch.setattr(Trainable, "learn", learning)
    train.train(small_run)
    assert seen == ["actor", "critic"] * 2
    monkeypatch.undo()
    monkeypatch.setattr("jppo.rollout.servers.make.start_vllm", lambda *_, **__: engine)
    monkeypatch.setattr(make, "may_overlap", lambda *_: False)
    small_run.trainer.run_dir, first = str(tmp_path / "after"), small_run.trainer.run_dir
    train.train(small_run)
    assert untimed(first, "time") == untimed(tmp_path / "after", "time")


def test_a_publish_that_fails_beside_the_critic_ends_the_run_with_a_checkpoint(small_run, engine, monkeypatch):
    loading = engine.load

    def load(tensors, *, version, mode="wait"):
        if version == 1:
            raise RolloutError("the server is gone")
        loading(tensors, version=version, mode=mode)

    monkeypatch.setattr(engine, "load", load)
    with pytest.raises(RolloutError, match="the server is gone"):
        train.train(small_run)
    assert (pathlib.Path(small_run.trainer.run_dir) / "checkpoints/1").is_dir()


def test_what_is_against_it(config):
    assert may_overlap(typed(config), ALONE)
    for setting, value in (("mode", "async"), ("sleep_level", 1), ("name", "inprocess")):
        with config.unlocked():
            before, config.rollout[setting] = config.rollout[setting], value
            assert not may_overlap(typed(config), ALONE), setting
            config.rollout[setting] = before
    assert not may_overlap(typed(config), Hosts(0, 2))


@pytest.mark.parametrize("mode, critic", [("sync", "a critic"), ("sync", None), ("async", "a critic")])
def test_each_state_is_published_once(config, monkeypatch, mode, critic):
    published, threads = [], set()

    def publish_policy(how, learner, sampler, now, **_):
        published.append(now)
        threads.add(threading.current_thread())

    monkeypatch.setattr(make, "publish_policy", publish_policy)
    with config.unlocked():
        config.rollout.mode = mode
    learner = types.SimpleNamespace(critic=critic)
    with contextlib.closing(make_publisher(typed(config), learner, "a sampler")) as publisher:
        for state in ("a", "b"):
            publisher.begin(state)
            publisher.finish(state)
        assert (threads == {threading.current_thread()}) == (mode == "async" or critic is None)
        publisher.finish("c")  # of a step that did not come as far as its critic
    assert published == ["a", "b", "c"]
