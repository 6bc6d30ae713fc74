"""jppo on the same work: its own log-prob pass and its own updates, as a step of training calls them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # after the worker's folder, which is there

import jax
import numpy as np
from machine import version
from work import base_config, change, flat_batch
from worker import Parts, Stage, Work, serve, timed

from jppo import settings
from jppo.learner import batch, ppo
from jppo.learner.make import make_mesh
from jppo.learner.ppo import ModelConfigs
from jppo.models import hf
from jppo.run.make import make_learner
from jppo.runlog.timers import Timers
from jppo.types import Batch, Trajectory


def make_trajectories(work: Work) -> list[Trajectory]:
    """Makes the batch in the form of vLLM's responses."""
    trajectories = []
    for i, n in enumerate(work.responses):
        sampled = np.repeat([False, True], [work.prompt, n])
        zeros = np.zeros(len(sampled), np.float32)
        version = np.where(sampled, 0, -1).astype(np.int32)
        trajectories.append(
            Trajectory(str(i), work.tokens[i, : len(sampled)], sampled, zeros, version, "", "length", 1)
        )
    return trajectories


def begin(work: Work) -> tuple[dict, dict[str, Stage]]:
    """Prepares both models and compiles all programs."""
    scan = f"model.scan_layers={jax.default_backend() != 'cpu'}"
    changes = ["model.init=pretrained", scan, *work.how["jppo"]]
    c = settings.typed(change(base_config(work.model, work.dtype), changes))
    mesh = make_mesh(c)
    _, cfg = hf.read_config(work.model)
    inputs = ModelConfigs(policy=cfg, critic=cfg, total_steps=1)
    learner, now = make_learner(c, inputs, mesh)
    trajectories = make_trajectories(work)
    data = flat_batch(trajectories, mesh)
    micros = batch.pack_micros(data, trajectories, plan=learner.plan, mesh=mesh)

    def score() -> Batch:
        return ppo.with_old_logprob(learner.passes, learner.recipe, data, micros, learner.policy(now))

    def mean(scores: Batch) -> float:
        return float(np.asarray(scores["old_logprob"])[scores.mask].mean(dtype=np.float64))

    first = score()
    given = {name: getattr(work, name)[:, : data.mask.shape[1]] for name in ("advantage", "returns", "value")}
    flat = first.with_arrays(**given)

    def scored() -> tuple[Parts, float]:
        seconds, check = timed(lambda: mean(score()))
        return {"logprobs": seconds}, check

    def updated() -> tuple[Parts, float]:
        nonlocal now
        timer = Timers()
        now, metrics = ppo.learn(learner, now, flat, trajectories, timer)
        took = timer.next_step()
        parts = {part: took[f"timing_s/update_{part}"] for part in ("actor", "critic")}
        return parts, metrics["actor/pg_loss"]

    updated()  # compiles
    report = {
        "versions": {"jax": version("jax"), "flax": version("flax")},
        "rows": [list(micro.host.inputs.shape) for micro in micros],
        "logp": mean(first),
    }
    return report, {"logprobs": scored, "update": updated}


if __name__ == "__main__":
    serve(begin)
