"""Compares jppo's mathematics with cases that verl computed: outputs, gradients and metrics.

    python scripts/check_golden.py DIR [--verbose]

A case is an .npz file anywhere under DIR: its settings in `meta` (JSON, with the name of the function as `fn`), inputs
`in_*`, expected outputs `out_*`; a row is one sequence. Each is run twice, in float64 and in float32, and passes when
both agree with every expected number b:

    |a - b| <= tolerance * max(|b|, FLOOR * largest),     tolerance 1e-6 in float64, 1e-4 in float32

where `largest` is the array's largest |b|; for a sum or mean it is the sum or mean of the terms' magnitudes, because
terms may cancel. Advantages, returns and weights are compared inside the mask; outside, verl's values are arbitrary and
jppo's must be 0. The last line is `N passed, N failed`; the exit code is 0 only if none failed.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jppo.algorithms import advantage, correction, kl, losses, masked
from jppo.errors import UserError
from jppo.models import heads
from jppo.settings import importance_band, rejection_rules
from jppo.types import Array

TOLERANCE = {"float64": 1e-6, "float32": 1e-4}
FLOOR = 0.1
# Cases where verl is wrong: the path under DIR -> why. They count as failed.
KNOWN: dict[str, str] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One file."""

    name: str  # its path under DIR
    meta: dict[str, Any]
    inputs: dict[str, np.ndarray]  # without the in_
    expected: dict[str, np.ndarray]  # without the out_, and the metrics of meta


@dataclasses.dataclass(frozen=True)
class Found:
    """jppo's value for one expected output."""

    value: Array
    where: Array | None = None  # compared here, 0 elsewhere; None: compared everywhere
    terms: Array | float = 0.0  # of a sum: its terms' magnitudes, added up
    narrow: bool = False  # verl computes it in float32, whatever its inputs are


# Compiled once for a shape: each has a scan, which is compiled anew for every call otherwise.
GAE = jax.jit(advantage.gae)
REINFORCE = jax.jit(advantage.reinforce_plus_plus)
REMAX = jax.jit(advantage.remax)
TOKEN_BASELINE = jax.jit(advantage.optimal_token_baseline, static_argnames="by_kept")

Meta = dict[str, Any]
Inputs = dict[str, Array]
Adapter = Callable[[Meta, Inputs], dict[str, Found]]


def prepared(case: Case, precision: str) -> Inputs:
    """Casts the inputs to the precision of the run and the mask to bool."""
    x: Inputs = {k: v.astype(precision) if v.dtype.kind == "f" else v for k, v in case.inputs.items()}
    if "mask" in x:
        x["mask"] = x["mask"] > 0
        x["segment"] = np.ones(x["mask"].shape, np.int32)
    return x


def gae(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Whitens the advantages, not the returns, which include the values."""
    mask = x["mask"]
    raw, returns = GAE(x["rewards"], x["values"], mask, gamma=meta["gamma"], lam=meta["lam"])
    terms = jnp.max(jnp.abs(x["values"]), where=mask, initial=0.0)
    return {"advantages": Found(masked.whiten(raw, mask), mask), "returns": Found(returns, mask, terms)}


def reinforce_plus_plus(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Advantages are whitened returns."""
    mask = x["mask"]
    returns = REINFORCE(x["rewards"], mask, gamma=meta["gamma"])
    return {"advantages": Found(masked.whiten(returns, mask), mask), "returns": Found(returns, mask)}


def remax(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns are before the baseline, as in verl."""
    rewards, mask = x["rewards"], x["mask"]
    advantages = REMAX(rewards, x["baselines"], mask)
    returns = REINFORCE(rewards, mask, gamma=1.0)
    return {"advantages": Found(advantages, mask), "returns": Found(returns, mask)}


def by_sequence(
    estimate: Callable[[Meta, Array, Array, Array], Array], *, whiten: bool = False, narrow: bool = False
) -> Adapter:
    """Adapts an estimator of settings, scores, lengths and groups [B]; the returns are the advantages."""

    def adapter(meta: Meta, x: Inputs) -> dict[str, Found]:
        mask, score = x["mask"], jnp.sum(x["rewards"], axis=1)
        group = np.unique(x["index"], return_inverse=True)[1].astype(np.int32)
        whole = estimate(meta, score, jnp.sum(mask, axis=1, dtype=score.dtype), group)
        each = masked.at_kept(whole, mask)
        advantages = Found(masked.whiten(each, mask) if whiten else each, mask, narrow=narrow)
        return {"advantages": advantages, "returns": advantages}

    return adapter


def token_baseline(*, by_kept: bool) -> Adapter:
    """Adapts the optimal token baseline by columns or by kept tokens."""

    def adapter(meta: Meta, x: Inputs) -> dict[str, Found]:
        mask, group = x["mask"], np.unique(x["index"], return_inverse=True)[1].astype(np.int32)
        energy = advantage.energy(x["old_logprob"], x["sum_pi_squared"], x.get("is_weights"))
        advantages, returns = TOKEN_BASELINE(x["rewards"], energy, mask, group, by_kept=by_kept)
        terms = jnp.max(jnp.abs(returns))
        return {"advantages": Found(advantages, mask, terms), "returns": Found(returns, mask, terms)}

    return adapter


def gdpo(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Normalises each part of the reward in its group; `parts` is [B, K]."""
    mask, parts = x["mask"], x["parts"]
    group = np.unique(x["index"], return_inverse=True)[1].astype(np.int32)
    weights = tuple(meta.get("reward_weights") or [1.0] * parts.shape[1])
    whole = advantage.gdpo(parts, group, weights=weights, norm_adv_by_std=meta["norm_adv_by_std"])
    advantages = Found(masked.whiten(masked.at_kept(whole, mask), mask), mask)
    return {"advantages": advantages, "returns": advantages}


def mean(each: Array, mask: Array, dtype: np.dtype) -> Found:
    """The mean over the tokens."""
    each, count = each.astype(dtype), jnp.sum(mask, dtype=dtype)
    return Found(masked.masked_sum(each, mask) / count, terms=masked.masked_sum(jnp.abs(each), mask) / count)


def total(each: Array, meta: Meta, x: Inputs, mode: str, mask: Array | None = None) -> tuple[Array, Array]:
    """Returns the sum over tokens weighted by `mode`, and of magnitudes; verl's scale is the row length."""
    mask, factor = x["mask"] if mask is None else mask, meta.get("loss_scale_factor")
    weight = losses.token_weights(
        mask,
        x["segment"],
        mode=mode,
        tokens=jnp.sum(mask, dtype=each.dtype),
        sequences=jnp.sum(mask.any(axis=1), dtype=each.dtype),
        scale=mask.shape[1] if factor is None else factor,
    )
    return masked.masked_sum(weight * each, mask), masked.masked_sum(jnp.abs(weight * each), mask)


def with_gradient(
    each: Callable[[Array], tuple[Array, Any]], at: Array, meta: Meta, x: Inputs, mode: str, mask: Array | None = None
) -> tuple[dict[str, Found], Any]:
    """Returns the sum of the first result of `each`, its gradient, and the second result."""

    def loss(at: Array) -> tuple[Array, Any]:
        value, more = each(at)
        value, terms = total(value, meta, x, mode, mask)
        return value, (terms, more)

    (value, (terms, more)), gradient = jax.value_and_grad(loss, has_aux=True)(at)
    return {"loss": Found(value, terms=terms), "grad": Found(gradient)}, more


def setting(meta: Meta, name: str) -> float:
    """A setting of a policy loss, by jppo's name; `clip_ratio` stands in for a bound that is not given."""
    key = name.replace("clip_", "clip_ratio_") if name in ("clip_low", "clip_high", "clip_c") else name
    if name in ("clip_low", "clip_high") and meta.get(key) is None:
        key = "clip_ratio"
    return meta[key]


def selecting(loss: Callable[..., losses.PolicyLoss], choose: Callable[[Meta, Inputs], Array], *names: str) -> Adapter:
    """Adapts a policy loss whose selected tokens `choose` returns; of `names` are its settings."""

    def adapter(meta: Meta, x: Inputs) -> dict[str, Found]:
        selected, weight = choose(meta, x), x.get("is_weights")

        def each(logp: Array):
            fixed = x["old_logprob"], x["advantages"], x["mask"], x["segment"], selected
            value, *clipped = loss(logp, *fixed, **{name: setting(meta, name) for name in names})
            return value if weight is None else value * weight, clipped

        out, clipped = with_gradient(each, x["logprob"], meta, x, meta["mode"])
        apart = kl.k1(x["old_logprob"], x["logprob"])
        apart = jnp.abs(apart) if loss is losses.kl_cov else apart
        dtype = x["logprob"].dtype
        more = {"actor/ppo_kl": mean(apart, x["mask"], dtype), "actor/pg_clipfrac": mean(clipped[0], x["mask"], dtype)}
        return out | more

    return adapter


def count(meta: Meta, x: Inputs, name: str) -> Array:
    """Returns the number of selected tokens."""
    return jnp.int32(max(1, int(meta[name] * int(x["mask"].sum()))))


def drawn(meta: Meta, x: Inputs) -> Array:
    """Returns the tokens of clip_cov; a case has no other draw if there are at most as many as may be drawn."""
    clips = {name: setting(meta, name) for name in ("clip_low", "clip_high")}
    band = dict(low=meta["clip_cov_lb"], high=meta["clip_cov_ub"], count=count(meta, x, "clip_cov_ratio"))
    fixed = x["logprob"], x["old_logprob"], x["advantages"], x["mask"]
    return losses.drawn_by_covariance(jax.random.key(0), *fixed, **clips, **band)


def largest(meta: Meta, x: Inputs) -> Array:
    """Returns the tokens of kl_cov."""
    return losses.highest_covariance(x["logprob"], x["advantages"], x["mask"], count=count(meta, x, "kl_cov_ratio"))


def bypass_mode(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Rejects tokens by the current policy; REINFORCE is also weighted by it."""
    logp, rollout, segment = x["logprob"], x["old_logprob"], x["segment"]
    log_ratio = jnp.where(x["mask"], logp - rollout, 0.0)
    rules = rejection_rules(meta.get("rollout_rs") or "", meta.get("rollout_rs_threshold") or "")
    kept = correction.keep(log_ratio, x["mask"], rules=rules, segment=segment)
    weight, loss = None, losses.clipped
    clips = {name: setting(meta, name) for name in ("clip_low", "clip_high", "clip_c")}
    if meta["loss_type"] == "reinforce":
        loss, clips = losses.gpg, {}
        if level := meta.get("rollout_is"):
            lower, upper = importance_band(meta.get("rollout_is_threshold", "2.0"))
            raw = correction.raw_weights(log_ratio, x["mask"], level=level, segment=segment)
            weight = correction.bound_weights(raw, lower=lower, upper=upper)
            if meta.get("rollout_is_batch_normalize"):
                weight = correction.normalized_weights(
                    weight, mean=correction.mean_weight(weight, x["mask"], level=level)
                )

    def each(logp: Array):
        value, *clipped = loss(logp, rollout, x["advantages"], kept, segment, **clips)
        return value if weight is None else value * weight, clipped

    out, clipped = with_gradient(each, logp, meta, x, meta["mode"], kept)
    far = jnp.inf if loss is losses.gpg else masked.FAR
    return out | {
        "actor/ppo_kl": mean(jnp.clip(kl.k1(rollout, logp), -far, far), kept, logp.dtype),
        "actor/pg_clipfrac": mean(clipped[0], kept, logp.dtype),
        "actor/pg_clipfrac_lower": mean(clipped[1], kept, logp.dtype),
    }


def policy(loss: Callable[..., losses.PolicyLoss], *settings: str, mode: str | None = None) -> Adapter:
    """Adapts a policy loss with its settings; without `mode` the case has the aggregation."""

    def adapter(meta: Meta, x: Inputs) -> dict[str, Found]:
        mask, logp, old_logp = x["mask"], x["logprob"], x["old_logprob"]
        given, weight = {name: setting(meta, name) for name in settings}, x.get("is_weights")
        if weight is not None and loss is losses.geo_mean:
            weight = correction.geometric(weight, mask)

        def each(logp: Array):
            value, *clipped = loss(logp, old_logp, x["advantages"], mask, x["segment"], **given)
            return value if weight is None else value * weight, clipped

        out, clipped = with_gradient(each, logp, meta, x, mode or meta["mode"])
        # As verl's: these losses count log-ratios as they are.
        far = jnp.inf if loss in (losses.gspo, losses.geo_mean, losses.dro) else masked.FAR
        kl_estimate = jnp.clip(kl.k1(old_logp, logp), -far, far)
        return out | {
            "actor/ppo_kl": mean(kl_estimate, mask, logp.dtype),
            "actor/pg_clipfrac": mean(clipped[0], mask, logp.dtype),
            "actor/pg_clipfrac_lower": mean(clipped[1], mask, logp.dtype),
        }

    return adapter


def value_loss(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Clipped around the old values."""

    def each(value: Array):
        return losses.clipped_value(value, x["values"], x["returns"], cliprange_value=meta["cliprange_value"])

    out, clipped = with_gradient(each, x["vpreds"], meta, x, meta["mode"])
    return out | {"clipfrac": mean(clipped, x["mask"], x["vpreds"].dtype)}


def agg_loss(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Aggregates the given loss."""
    return with_gradient(lambda loss: (loss, None), x["loss"], meta, x, meta["mode"])[0]


def entropy(meta: Meta, x: Inputs) -> dict[str, Found]:
    """From logits."""
    return with_gradient(
        lambda logits: (heads.entropy_of(jnp.asarray(logits)), None), x["logits"], meta, x, meta["mode"]
    )[0]


def kl_penalty(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns the estimate per token, and the gradient of their sum over the mask."""
    estimate, logp, ref = kl.ESTIMATORS[meta["kind"]], x["logprob"], x["ref_logprob"]
    gradient = jax.grad(lambda logp: masked.masked_sum(estimate(logp, ref), x["mask"]))(logp)
    return {"kl": Found(estimate(logp, ref)), "grad": Found(gradient)}


def forward_kl_topk(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns the KL of each position, and the gradient of their sum; verl computes it in float32."""

    def each(logits: Array) -> Array:
        return kl.forward_kl_topk(logits, x["ref_logits"], topk=meta["topk"], min_logp=meta["min_logp"])

    gradient = jax.grad(lambda logits: jnp.sum(each(logits)))(x["logits"])
    return {"kl": Found(each(x["logits"]), narrow=True), "grad": Found(gradient, narrow=True)}


def adaptive_kl(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns the coefficient after each update."""
    out: list[Array] = []
    coef: Array = jnp.asarray(meta["init"], x["kl"].dtype)
    for current, steps in zip(x["kl"], x["n_steps"], strict=True):
        coef = kl.adaptive(coef, current, steps=int(steps), target=meta["target"], horizon=meta["horizon"])
        out.append(coef)
    return {"coef": Found(jnp.stack(out))}


def is_weights(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns bounded importance weights, normalised if the case asks for it."""
    mask, level = x["mask"], meta["level"]
    lower, upper = importance_band(meta["threshold"])
    raw = correction.raw_weights(x["log_ratio"], mask, level=level)
    weight = correction.bound_weights(raw, lower=lower, upper=upper)
    if meta["batch_normalize"]:
        weight = correction.normalized_weights(weight, mean=correction.mean_weight(weight, mask, level=level))
    return {"weights": Found(weight, mask)}


def rejection_mask(meta: Meta, x: Inputs) -> dict[str, Found]:
    """Returns the remaining mask."""
    rules = rejection_rules(meta["rs"], meta["threshold"])
    return {"mask": Found(correction.keep(x["log_ratio"], x["mask"], rules=rules))}


ADAPTERS: dict[str, Adapter] = {
    "gae": gae,
    "reinforce_plus_plus": reinforce_plus_plus,
    "remax": remax,
    "grpo": by_sequence(lambda m, s, n, g: advantage.grpo(s, g, norm_adv_by_std=m["norm_adv_by_std"])),
    "grpo_passk": by_sequence(lambda m, s, n, g: advantage.grpo_passk(s, g, norm_adv_by_std=m["norm_adv_by_std"])),
    "rloo": by_sequence(lambda m, s, n, g: advantage.rloo(s, g)),
    "rloo_vectorized": by_sequence(lambda m, s, n, g: advantage.rloo_vectorized(s, g)),
    "reinforce_plus_plus_baseline": by_sequence(
        lambda m, s, n, g: advantage.reinforce_plus_plus_baseline(s, g), whiten=True
    ),
    "opo": by_sequence(lambda m, s, n, g: advantage.opo(s, n, g)),
    "grpo_vectorized": by_sequence(
        lambda m, s, n, g: advantage.grpo(s, g, norm_adv_by_std=m["norm_adv_by_std"]), narrow=True
    ),
    "gpg_advantage": by_sequence(lambda m, s, n, g: advantage.gpg(s, g, jnp.ones_like(g, bool))),
    "gdpo": gdpo,
    "optimal_token_baseline": token_baseline(by_kept=False),
    "tir_optimal_token_baseline": token_baseline(by_kept=True),
    "vanilla": policy(losses.clipped, "clip_low", "clip_high", "clip_c"),
    "gspo": policy(losses.gspo, "clip_low", "clip_high"),
    "geo_mean": policy(losses.geo_mean, "clip_low", "clip_high", mode="seq-mean-token-mean"),
    "cispo": policy(losses.cispo, "clip_low", "clip_high"),
    "sapo": policy(losses.sapo, "tau_pos", "tau_neg", mode="seq-mean-token-mean"),
    "gpg": policy(losses.gpg),
    "dro": policy(losses.dro, "dro_beta"),
    "dppo_tv": policy(losses.dppo_tv, "clip_low", "clip_high", "clip_c"),
    "dppo_kl": policy(losses.dppo_kl, "clip_low", "clip_high", "clip_c"),
    "clip_cov": selecting(losses.clip_cov, drawn, "clip_low", "clip_high"),
    "kl_cov": selecting(losses.kl_cov, largest, "ppo_kl_coef"),
    "bypass_mode": bypass_mode,
    "value_loss": value_loss,
    "agg_loss": agg_loss,
    "entropy": entropy,
    "kl_penalty": kl_penalty,
    "adaptive_kl": adaptive_kl,
    "forward_kl_topk": forward_kl_topk,
    "is_weights": is_weights,
    "rejection_mask": rejection_mask,
}


def error(output: Found, expected: np.ndarray) -> float:
    """The largest |a - b| / max(|b|, FLOOR * largest); infinite where a is NaN, or not 0 outside its mask."""
    a, b = np.asarray(output.value, np.float64), np.asarray(expected, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"jppo's shape is {a.shape}, not {b.shape}")
    if output.where is not None:
        b = np.where(output.where, b, 0.0)
        if np.any(a[~np.asarray(output.where)] != 0):
            return np.inf
    largest = max(np.max(np.abs(b[np.isfinite(b)]), initial=0.0), float(output.terms))
    with np.errstate(divide="ignore", invalid="ignore"):
        each = np.where(a == b, 0.0, np.abs(a - b) / np.maximum(np.abs(b), FLOOR * largest))
    return float(np.max(np.where(np.isnan(each), np.inf, each), initial=0.0))


def check(case: Case) -> tuple[list[str], dict[str, float]]:
    """Returns the faults of a case, one line each, and its largest error in each precision."""
    faults, worst = [], {}
    for precision, tolerance in TOLERANCE.items():
        with jax.enable_x64(precision == "float64"), jax.default_device(jax.devices("cpu")[0]):
            try:
                pairs = run(case, precision)
                errors = {name: error(*pair) for name, pair in pairs.items()}
            except Exception as e:  # whatever one case does, the others are checked and this one is counted
                faults.append(f"{precision}: {type(e).__name__}: {' '.join(str(e).split())}")
                continue
        worst[precision] = max(errors.values())
        for name, largest in errors.items():
            most = TOLERANCE["float32"] if pairs[name][0].narrow else tolerance
            if largest > most:
                faults.append(f"{name}, {precision}: relative error {largest:.1e}, of at most {most:.0e}")
    if case.name in KNOWN:
        faults.append(f"verl is wrong: {KNOWN[case.name]}")
    return faults, worst


def run(case: Case, precision: str) -> dict[str, tuple[Found, np.ndarray]]:
    """Returns jppo's output next to each expected output of the case."""
    fn = case.meta.get("fn")
    if fn not in ADAPTERS:
        raise ValueError(f"fn={fn!r} is not known; it is one of {', '.join(ADAPTERS)}")
    outputs = ADAPTERS[fn](case.meta, prepared(case, precision))
    if unknown := case.expected.keys() - outputs.keys():
        raise ValueError(f"no such output of {fn}: {', '.join(sorted(unknown))}")
    for name in case.expected:
        dtype = np.dtype(outputs[name].value.dtype)
        if dtype.kind == "f" and dtype != precision:
            raise TypeError(f"{name} is {dtype}")
    return {name: (outputs[name], b) for name, b in case.expected.items()}


def read(folder: str | pathlib.Path) -> list[Case]:
    """All cases under a folder, by name."""
    root = pathlib.Path(folder)
    if not root.is_dir():
        raise UserError(f"DIR={folder} must be a folder of .npz cases; give one that is there")
    files = sorted(root.rglob("*.npz"))
    if not files:
        raise UserError(f"DIR={folder} must hold .npz cases, and there are none; give another")
    return [read_case(file, file.relative_to(root).as_posix()) for file in files]


def read_case(file: pathlib.Path, name: str) -> Case:
    """One case, whole in memory."""
    try:
        with np.load(file, allow_pickle=False) as z:
            arrays = {key: z[key] for key in z.files}
        meta = json.loads(str(arrays["meta"]))
        metrics = {**meta.get("metrics", {}), **{k: meta[k] for k in ("clipfrac",) if k in meta}}
        expected = {k.removeprefix("out_"): v for k, v in arrays.items() if k.startswith("out_")}
        expected |= {k: np.asarray(v, np.float64) for k, v in metrics.items()}
        if not expected:
            raise ValueError("nothing is expected in it")
    except (OSError, EOFError, ValueError, KeyError, AttributeError, TypeError, zipfile.BadZipFile, zlib.error) as e:
        why = " ".join(str(e).split())
        raise UserError(
            f"{file} must be an .npz of meta, in_* and out_* arrays, and cannot be read ({type(e).__name__}: {why});"
            " make it again or take it away"
        ) from e
    inputs = {k.removeprefix("in_"): v for k, v in arrays.items() if k.startswith("in_")}
    return Case(name, meta, inputs, expected)


def main(argv: list[str] | None = None) -> int:
    """Exits with 0 if all cases pass, 1 if one fails, 2 if they cannot be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dir", metavar="DIR", help="looked through for .npz cases")
    parser.add_argument("--verbose", action="store_true", help="a line for each case that passes, too")
    args = parser.parse_args(argv)
    try:
        cases = read(args.dir)
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    counts: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    for case in cases:
        faults, worst = check(case)
        counts[case.name.rpartition("/")[0] or "."][bool(faults)] += 1
        for fault in faults:
            print(f"FAILED {case.name}: {fault}")
        if args.verbose and not faults:
            print(f"passed {case.name}: {', '.join(f'{e:.1e} in {precision}' for precision, e in worst.items())}")
    width = max(len(folder) for folder in counts)
    print(f"{'':<{width}}  passed  failed")
    for folder, (passed, failed) in counts.items():
        print(f"{folder:<{width}}  {passed:>6}  {failed:>6}")
    failed = sum(count[1] for count in counts.values())
    print(f"{len(cases) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
