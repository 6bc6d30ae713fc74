"""jppo on the same work: its own log-prob pass and its own updates, as a step of training calls them."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))  # after the worker's folder, which is there

import jax
import numpy as np
from machine import version
from work import base_config, change
from worker import Parts, Stage, Work, serve, timed

from jppo import assemble
from jppo.data.prompts import PromptSet
from jppo.io.timers import Timers
from jppo.learner import batch, ppo
from jppo.models import hf
from jppo.structs import Scored, Trajectory
from jppo.train import update_models


def make_trajectories(work: Work) -> list[Trajectory]:
    """The batch as vLLM would have given it."""
    found = []
    for i, n in enumerate(work.responses):
        sampled = np.repeat([False, True], [work.prompt, n])
        zeros = np.zeros(len(sampled), np.float32)
        version = np.where(sampled, 0, -1).astype(np.int32)
        found.append(Trajectory(str(i), work.tokens[i, : len(sampled)], sampled, zeros, version, "", "length", 1))
    return found


def entries(given: np.ndarray, sequence: np.ndarray, position: np.ndarray, work: Work) -> np.ndarray:
    """What is given for each token of a response, at the entries of rows; 0 elsewhere."""
    at = position + 1 - work.prompt
    inside = (sequence >= 0) & (at >= 0) & (at < work.responses[sequence])
    return np.where(inside, given[sequence, np.clip(at, 0, given.shape[1] - 1)], np.float32(0))


def begin(work: Work) -> tuple[dict, dict[str, Stage]]:
    """Both models, every program compiled."""
    c = base_config(work.model, work.dtype)
    c = change(c, ["model.init=pretrained", f"model.scan_layers={jax.default_backend() != 'cpu'}", *work.how["jppo"]])
    mesh, empty = assemble.make_mesh(c), PromptSet([], overlong=0)
    _, cfg = hf.read_config(work.model)
    models = dict(policy=cfg, critic=cfg, reference=None, adapters=None, critic_adapters=None)
    inputs = assemble.Inputs(None, (), empty, empty, (), **models, agent=None, total_steps=1)
    learner, now = assemble.make_learner(c, inputs, mesh)
    trajectories = make_trajectories(work)
    rows = batch.make(trajectories, plan=learner.plan, mesh=mesh)

    def score() -> list[Scored]:
        return ppo.score_rows(learner.passes, learner.recipe, rows, learner.policy(now))[0]

    def mean(scored: list[Scored]) -> float:
        pairs = [(np.asarray(one.logp), np.asarray(one.rows.mask)) for one in scored]
        return float(sum(x[mask].sum(dtype=np.float64) for x, mask in pairs) / sum(mask.sum() for _, mask in pairs))

    first = score()
    flat = batch.flatten(first, len(trajectories))
    at = flat.arrays["sequence"], flat.arrays["position"]
    for name in ("advantage", "returns", "value"):
        flat.arrays[name] = entries(getattr(work, name), *at, work)

    def scored() -> tuple[Parts, float]:
        seconds, check = timed(lambda: mean(score()))
        return {"logprobs": seconds}, check

    def updated() -> tuple[Parts, float]:
        nonlocal now
        timer = Timers()
        now, metrics = update_models(c, learner, now, flat, trajectories, timer)
        took = timer.next_step()
        parts = {part: took[f"timing_s/update_{part}"] for part in ("actor", "critic")}
        return parts, metrics["actor/pg_loss"]

    updated()  # compiles
    said = {
        "versions": {"jax": version("jax"), "flax": version("flax")},
        "rows": [list(one.inputs.shape) for one in rows],
        "logp": mean(first),
    }
    return said, {"logprobs": scored, "update": updated}


if __name__ == "__main__":
    serve(begin)
