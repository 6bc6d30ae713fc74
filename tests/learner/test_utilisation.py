"""FLOP utilisation is of the stages that took place, and of the epochs over the batch."""

import types

import numpy as np

from jppo.learner import cost, sharding
from jppo.learner.ppo import Epochs
from jppo.learner.utilisation import utilisation
from jppo.models import lora
from jppo.models.freeze import ALL_LEARN
from tests.learner.test_cost import QWEN


def some(length, sampled):
    """All of a trajectory that is asked for here."""
    return types.SimpleNamespace(tokens=np.zeros(length), sampled=np.arange(length) >= length - sampled)


def test_shares_are_of_the_stages_that_took_place(monkeypatch):
    def learner(bypass):
        epochs = [Epochs(count, 1, False, 1, warmup=0, in_warmup=0) for count in (2, 3)]
        recipe = types.SimpleNamespace(bypass=bypass)
        return types.SimpleNamespace(recipe=recipe, mesh=None, actor_epochs=epochs[0], critic_epochs=epochs[1])

    both = [some(5, 2), some(9, 4)]
    how = lora.Lora(2, 1.0, ("q_proj",))
    learned = dict(adapters=None, critic_adapters=how, frozen=ALL_LEARN, critic_frozen=ALL_LEARN)
    inputs = types.SimpleNamespace(policy=QWEN, critic=QWEN, **learned)
    monkeypatch.setattr(sharding, "find_peak", lambda *_: sharding.Peak(1e6, ""))
    seconds = {"update_actor": 0.5, "update_critic": 0.25, "old_log_prob": 0.125, "gen": 9.0}
    at = dict(step=0, dtype="float32")
    found = utilisation(learner(False), inputs, both, seconds, **at)
    assert found == {
        "perf/mfu/actor": 2 * cost.update(QWEN, [5, 9], head_tokens=6) / 0.5 / 1e6,
        "perf/mfu/critic": 3 * cost.update(QWEN, [5, 9], head_tokens=0, adapters=how) / 0.25 / 1e6,
        "perf/mfu/actor_infer": cost.forward(QWEN, [5, 9], head_tokens=6) / 0.125 / 1e6,
    }
    found = utilisation(learner(False), inputs, both, {"update_critic": 1.0}, **at)
    assert list(found) == ["perf/mfu/critic"]
    alone = types.SimpleNamespace(**vars(inputs) | {"critic": None})
    assert list(utilisation(learner(True), alone, both, seconds, **at)) == ["perf/mfu/actor"]
