"""How the responses of training are sampled, in words, and where that is not what is learned from."""

from ml_collections import ConfigDict

from jppo import config as settings
from jppo.io.diagnosis import Finding


def describe_sampling(c: ConfigDict) -> str:
    """How the responses of training are drawn and what ends them."""
    r = c.rollout
    drawn = ", ".join([f"temperature {r.temperature:g}", *(f"{name} {x:g}" for name, x in settings.cuts(r).items())])
    texts = " or ".join(map(repr, settings.stop_texts(r.stop)))
    ends = [*([] if r.ignore_eos else ["an end token"]), *([texts] if texts else [])]
    return f"{drawn}; a response ends with {' or '.join([*ends, f'{c.data.max_response_length:,} tokens'])}"


def forewarn(c: ConfigDict, step: int = 0) -> list[Finding]:
    """What the settings are to be warned of before the run does anything.

    A distribution that is cut is renormalised, by what is left of it at every token; the trainer's log-probs are of the
    whole. Importance weights undo just that.
    """
    cut = ", ".join(f"rollout.{name}={value:g}" for name, value in settings.cuts(c.rollout).items())
    if not cut or (c.algorithm.old_logprob == "correction" and c.algorithm.rollout_is != "none"):
        return []
    return [
        Finding(
            step,
            "sampling_cut",
            f"{cut}: responses are drawn from a part of the policy, and learned from as if from the whole of it",
            "set algorithm.old_logprob=correction with algorithm.rollout_is=token, or leave the cut to"
            " rollout.val_kwargs",
        )
    ]
