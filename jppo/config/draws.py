"""What the settings of sampling may be, for the rollouts of training and for a test."""

import ml_collections

from jppo.config.defaults import default
from jppo.config.texts import stop_texts
from jppo.errors import UserError

CUTS = ("top_p", "top_k", "min_p")  # settings that take tokens out of the distribution
COLDEST, HOTTEST = 0.01, 2.0  # temperatures of vLLM: below it samples at 0.01 and says so in its log alone


def check_sampling(config: ml_collections.ConfigDict, *, training: bool) -> None:
    """UserError at the first that cannot be, alone or with the others."""
    r, how = config.rollout, config.rollout.val_kwargs
    stop_texts(r.stop)
    for name, value in (("rollout.min_p", r.min_p), ("rollout.val_kwargs.min_p", how.min_p)):
        if not value < 1:
            raise UserError(f"{name}={value} must be below 1: it would leave the likeliest token alone; try 0.05")
    if training and not r.temperature > 0:
        raise UserError(
            f"rollout.temperature={r.temperature} must be above 0: greedy responses to a prompt are all the same, and"
            " have no probability to learn from; try 1.0 (a test is greedy by rollout.val_kwargs.temperature=0.0)"
        )
    _check_test(how)
    if training and r.name == "sglang":
        for name, value in cuts(r).items():
            raise UserError(
                f"rollout.{name}={value}: rollout.name='sglang' gives log-probs of the whole distribution, not of what"
                f" is left of it to draw from; leave {name} out, or take rollout.name=vllm"
            )
    if r.name == "vllm":
        asked = [("rollout.temperature", r.temperature)] if training else []
        for name, value in (*asked, ("rollout.val_kwargs.temperature", how.temperature)):
            if value != 0 and not COLDEST <= value <= HOTTEST:
                raise UserError(
                    f"{name}={value}: vLLM samples at temperatures from {COLDEST} to {HOTTEST} as it is told; give one"
                    " of these, or take rollout.name=inprocess"
                )


def cuts(how: ml_collections.ConfigDict) -> dict[str, float]:
    """The settings of a section that take tokens out of the distribution, where they do."""
    usual = default().rollout
    return {name: value for name in CUTS if (value := getattr(how, name)) != usual[name]}


def _check_test(how: ml_collections.ConfigDict) -> None:
    if how.temperature != 0.0:
        return
    if how.n > 1:
        raise UserError(
            f"rollout.val_kwargs.n={how.n}: at rollout.val_kwargs.temperature=0.0 all responses to a prompt are the"
            " same; raise the temperature, or set n to 1"
        )
    for name, value in cuts(how).items():
        raise UserError(
            f"rollout.val_kwargs.{name}={value}: at rollout.val_kwargs.temperature=0.0 the likeliest token is taken,"
            f" whatever else is left; raise the temperature, or leave {name} out"
        )
