r"""Writes tests/algorithms/golden/verl.json: outputs and gradients of verl's own estimators and policy losses.

Also presets.json, the fields of each preset of its rollout correction.

    python scripts/make_golden.py

Run it with a Python that can import verl, from PyPI or a checkout in PYTHONPATH, and its dependencies (torch, ray,
tensordict, omegaconf). Inputs have four digits, so that the file is short; everything is computed in float64.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

OUT = pathlib.Path(__file__).resolve().parents[1] / "tests/algorithms/golden/verl.json"
B, L = 7, 9
GROUPS = (3, 0, 3, 5, 0, 3, 9)  # of 2, 3, 1 and 1
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
LAYOUTS = ("right", "gaps", "left")
Arrays = dict[str, Any]
LOSSES: dict[str, tuple[dict[str, Any], ...]] = {
    "dppo_tv": (
        dict(clip_ratio_low=0.1, clip_ratio_high=0.15, clip_ratio_c=3.0),
        dict(clip_ratio=0.05, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=1.1),
    ),
    "dppo_kl": (
        dict(clip_ratio_low=0.05, clip_ratio_high=0.02, clip_ratio_c=20.0),
        dict(clip_ratio=0.01, clip_ratio_low=None, clip_ratio_high=None, clip_ratio_c=1.1),
    ),
    "dro": (dict(dro_beta=0.1), dict(dro_beta=2.0)),
    "clip_cov": (
        dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_cov_ratio=1.0, clip_cov_lb=0.1, clip_cov_ub=1.2),
        dict(clip_ratio_low=0.2, clip_ratio_high=0.2, clip_cov_ratio=0.0002, clip_cov_lb=50.0, clip_cov_ub=60.0),
    ),
    "kl_cov": (dict(kl_cov_ratio=0.0002, ppo_kl_coef=1.0), dict(kl_cov_ratio=0.29, ppo_kl_coef=0.1)),
}
_CLIPS = dict(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
BYPASSES = (
    dict(loss_type="ppo_clip"),
    dict(loss_type="ppo_clip", rollout_is="token"),
    dict(loss_type="ppo_clip", rollout_rs="seq_mean_k1", rollout_rs_threshold="0.9_1.1"),
    dict(loss_type="ppo_clip", rollout_rs="seq_mean_k3,token_k1", rollout_rs_threshold="0.1,2.0"),
    dict(loss_type="reinforce"),
    dict(loss_type="reinforce", rollout_is="sequence"),
    dict(loss_type="reinforce", rollout_is="token", rollout_is_threshold="0.5_1.5"),
    dict(loss_type="reinforce", rollout_is="sequence", rollout_rs="seq_max_k2", rollout_rs_threshold="0.4"),
    dict(loss_type="reinforce", rollout_is="token", rollout_is_threshold=1.2, rollout_is_batch_normalize=True),
    dict(loss_type="reinforce", rollout_is="token", rollout_rs="seq_sum_k1", rollout_rs_threshold="0.5_2.0"),
)
PARTS = ("accuracy", "format", "length")


def mask_of(rng: np.random.Generator, layout: str) -> np.ndarray:
    """Draws a mask: padding on the right or left, or holes too and a response of which nothing is kept."""
    mask = np.zeros((B, L))
    for b, length in enumerate(rng.integers(1, L + 1, B)):
        mask[b, L - length :] = 1
    mask = mask if layout == "left" else mask[:, ::-1].copy()
    if layout == "gaps":
        mask *= rng.random((B, L)) < 0.75
        mask[2] = 0
    return mask


def draw(seed: int, layout: str) -> Arrays:
    """Draws the inputs of a policy loss; two log-ratios are far out."""
    rng = np.random.default_rng(seed)
    old = np.minimum(-0.05, -rng.exponential(0.7, (B, L)))
    new = np.minimum(-0.01, old + 0.4 * rng.normal(size=(B, L)))
    new[0, 0], old[1, 0] = old[0, 0] - 25.0, new[1, 0] - 22.0
    out = dict(logprob=new, old_logprob=old, advantages=rng.normal(size=(B, L)))
    out["advantages"][:, 1] = 0.0
    return {name: np.round(x, 4) for name, x in out.items()} | {"mask": mask_of(rng, layout)}


def policy_loss(fn: str, settings: dict[str, Any], mode: str, x: Arrays) -> tuple[dict[str, Any], Arrays]:
    """Returns a policy loss's metrics, and its value and gradient."""
    import torch
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig, PolicyLossConfig

    def some(kind: type) -> dict[str, Any]:
        return {k: v for k, v in settings.items() if k in {field.name for field in dataclasses.fields(kind)}}

    names = dict(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    corrected = RolloutCorrectionConfig(**{"rollout_is": None} | some(RolloutCorrectionConfig))
    inner = PolicyLossConfig(loss_mode=fn, rollout_correction=corrected, **some(PolicyLossConfig))
    config = ActorConfig(**names, policy_loss=inner, **some(ActorConfig))
    tensors = {name: torch.tensor(value) for name, value in x.items()}
    logp = tensors["logprob"].requires_grad_()
    loss, metrics = get_policy_loss_fn(fn)(
        old_log_prob=tensors["old_logprob"], log_prob=logp, advantages=tensors["advantages"],
        response_mask=tensors["mask"], loss_agg_mode=mode, config=config, rollout_is_weights=tensors.get("is_weights"),
    )  # fmt: skip
    loss.backward()
    kept = {k: v for k, v in metrics.items() if k.startswith("actor/")}
    return kept, dict(loss=loss.detach().numpy(), grad=logp.grad.numpy())


def losses() -> Iterator[dict[str, Any]]:
    """Yields the cases of policy losses."""
    plan = [(fn, settings) for fn, several in LOSSES.items() for settings in several]
    plan += [("bypass_mode", _CLIPS | settings) for settings in BYPASSES]
    for number, (fn, settings) in enumerate(plan):
        for k, layout in enumerate(LAYOUTS):
            mode, x = MODES[(number + k) % len(MODES)], draw(100 * number + k, layout)
            if k == 1 and fn != "bypass_mode":
                x["is_weights"] = np.round(np.random.default_rng(k).uniform(0, 2, (B, L)), 4)
            metrics, out = policy_loss(fn, settings, mode, x)
            yield case(f"{fn}-{number}-{layout}", dict(fn=fn, mode=mode, metrics=metrics, **settings), x, out)


def advantage(fn: str, x: Arrays, **more: Any) -> Arrays:
    """Returns an estimator's advantages and returns."""
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    given = {name: torch.tensor(value) for name, value in x.items() if name not in ("index", "parts")}
    names = dict(rewards="token_level_rewards", mask="response_mask", old_logprob="old_log_probs",
      is_weights="rollout_is_weights")  # fmt: skip
    given = {names.get(name, name): value for name, value in given.items()}
    estimate = get_adv_estimator_fn(fn)(index=np.array(GROUPS), **given, **more)
    return dict(advantages=estimate[0].numpy().astype(float), returns=estimate[1].numpy().astype(float))


def estimators() -> Iterator[dict[str, Any]]:
    """Yields the cases of advantage estimators."""
    for seed, layout in enumerate((*LAYOUTS, *LAYOUTS)):
        rng = np.random.default_rng(900 + seed)
        mask = mask_of(rng, layout)
        if layout == "gaps":
            mask[2, 3] = 1  # verl's whitening and gdpo want a token in every response
        x: Arrays = dict(rewards=np.round(rng.normal(size=(B, L)), 2) * mask, mask=mask, index=np.array(GROUPS))
        x["rewards"][1] = 0.0
        for divide in (True, False):
            out = advantage("grpo_vectorized", x, norm_adv_by_std_in_grpo=divide)
            meta = dict(fn="grpo_vectorized", norm_adv_by_std=divide)
            yield case(f"grpo_vectorized-{divide}-{layout}-{seed}", meta, x, out)
            yield gdpo(rng, x, divide, f"gdpo-{divide}-{layout}-{seed}")
        yield case(f"gpg-{layout}-{seed}", dict(fn="gpg_advantage"), x, advantage("gpg", x))
        if seed >= len(LAYOUTS):  # a group of two of which one has no token
            x["mask"], x["rewards"] = (
                np.where(np.arange(B)[:, None] == 4, 0.0, x[name]) for name in ("mask", "rewards")
            )
        probability = rng.uniform(0.02, 0.98, (B, L))
        x["old_logprob"] = np.round(np.log(probability), 4)
        x["sum_pi_squared"] = np.round(probability**2 + rng.uniform(0, 0.5, (B, L)) * (1 - probability) ** 2, 4)
        for weighted in (False, True):
            x |= dict(is_weights=np.round(rng.uniform(0, 2, (B, L)), 4)) if weighted else {}
            for fn in ("optimal_token_baseline", "tir_optimal_token_baseline"):
                yield case(f"{fn}-{weighted}-{layout}-{seed}", dict(fn=fn), x, advantage(fn, x))


def gdpo(rng: np.random.Generator, x: Arrays, divide: bool, name: str) -> dict[str, Any]:
    """Returns a case of GDPO, whose parts of the reward have few digits: verl keeps them in float32."""
    parts, weights = rng.integers(0, 5, (B, len(PARTS))) / 4, [1.0, 0.5, 0.25] if divide else None
    prompts = np.ones((B, 2))
    columns = dict(zip(PARTS, parts.T, strict=True))
    out = gdpo_advantage(x, columns, prompts, divide, weights)
    inputs = dict(parts=parts, mask=x["mask"], index=x["index"])
    return case(name, dict(fn="gdpo", norm_adv_by_std=divide, reward_weights=weights), inputs, out)


def gdpo_advantage(x: Arrays, columns: Arrays, prompts: np.ndarray, divide: bool, weights: Any) -> Arrays:
    """Calls verl's GDPO with the batch that it reads lengths from."""
    import torch

    settings = dict(gdpo_reward_keys=list(columns), gdpo_reward_weights=weights)
    attention = torch.tensor(np.concatenate([prompts, x["mask"]], axis=1)).long()
    batch = dict(prompts=torch.tensor(prompts), attention_mask=attention)
    options = dict(config=settings, non_tensor_batch=columns, batch=batch, norm_adv_by_std_in_grpo=divide)
    return advantage("gdpo", x, **options)


def distillation() -> Iterator[dict[str, Any]]:
    """Yields the cases of the forward KL over a teacher's likeliest tokens."""
    import types

    import torch
    from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk

    for seed, (topk, least) in enumerate(((1, None), (3, None), (3, -2.5), (11, None))):
        rng = np.random.default_rng(seed)
        logits, ref_logits = (np.round(rng.normal(scale=1.5, size=(6, 11)), 3) for _ in range(2))
        student = torch.tensor(logits)[None].requires_grad_()
        teacher = torch.log_softmax(torch.tensor(ref_logits), -1).topk(topk)
        nested = [torch.nested.nested_tensor([x], layout=torch.jagged) for x in (teacher.values, teacher.indices)]
        loss = types.SimpleNamespace(log_prob_min_clamp=least)
        config = types.SimpleNamespace(distillation_loss=loss)
        divergence = compute_forward_kl_topk(student, *nested, config, "thd")["distillation_losses"].clamp_min(0.0)
        divergence.sum().backward()
        out = dict(kl=divergence[0].detach().numpy().astype(float), grad=student.grad[0].numpy())
        meta = dict(fn="forward_kl_topk", topk=topk, min_logp=least)
        yield case(f"forward_kl_topk-{seed}", meta, dict(logits=logits, ref_logits=ref_logits), out)


def case(name: str, meta: dict[str, Any], inputs: Arrays, outputs: Arrays) -> dict[str, Any]:
    """Returns a case as JSON."""
    plain: Callable[[Arrays], dict[str, Any]] = lambda arrays: {k: np.asarray(v).tolist() for k, v in arrays.items()}  # noqa: E731
    return dict(name=name, meta=meta, inputs=plain(inputs), expected=plain(outputs))


def presets() -> dict[str, dict[str, Any]]:
    """Returns the presets' fields by name."""
    from verl.trainer.config import RolloutCorrectionConfig as Preset

    names = [
        name for name, member in vars(Preset).items() if isinstance(member, classmethod) and not name.startswith("_")
    ]
    configs = {name: getattr(Preset, name)() for name in names}
    return {
        name: {f.name: getattr(config, f.name) for f in dataclasses.fields(config)} for name, config in configs.items()
    }


def main() -> None:
    """Writes the files."""
    cases = [*losses(), *estimators(), *distillation()]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("[\n" + ",\n".join(json.dumps(one) for one in cases) + "\n]\n", encoding="utf-8")
    OUT.with_name("presets.json").write_text(json.dumps(presets(), indent=1) + "\n", encoding="utf-8")
    print(f"{len(cases)} cases in {OUT}")


if __name__ == "__main__":
    main()
