"""Describes how training samples are drawn and warns where they differ from the trained distribution."""

from jppo import settings
from jppo.runlog.diagnosis import Alert
from jppo.settings import Settings


def describe_sampling(c: Settings) -> str:
    """Describes the sampling of training responses and what ends them."""
    r = c.rollout
    drawn = ", ".join([f"temperature {r.temperature:g}", *(f"{name} {x:g}" for name, x in settings.cuts(r).items())])
    texts = " or ".join(map(repr, settings.stop_texts(r.stop)))
    ends = [*([] if r.ignore_eos else ["an end token"]), *([texts] if texts else [])]
    return f"{drawn}; a response ends with {' or '.join([*ends, f'{c.data.max_response_length:,} tokens'])}"


def sampling_warnings(c: Settings, step: int = 0) -> list[Alert]:
    """Returns warnings on the sampling settings, before the run does anything.

    A filtered distribution is renormalised at every token; the trainer's log-probs are of the full one. Importance
    weights correct exactly this.
    """
    found = []
    cut = ", ".join(f"rollout.{name}={value:g}" for name, value in settings.cuts(c.rollout).items())
    if cut and (c.algorithm.old_logprob != "correction" or c.algorithm.rollout_is == "none"):
        said = f"{cut}: responses are drawn from a part of the policy, and learned from as if from the whole of it"
        remedy = "set algorithm.old_logprob=correction with algorithm.rollout_is=token, or leave the cut to"
        found.append(Alert(step, "sampling_cut", said, f"{remedy} rollout.val_kwargs"))
    # In process, only the trainer can change the weights.
    if c.algorithm.old_logprob == "bypass" and c.rollout.max_kl_jump and c.rollout.name != "inprocess":
        said = (
            f"rollout.max_kl_jump={c.rollout.max_kl_jump:g}: servers whose weights are changed in mid-run go unnoticed,"
        )
        remedy = "set algorithm.old_logprob=decoupled, or rollout.max_kl_jump=0 where nobody else reaches the servers"
        why = "as algorithm.old_logprob=bypass computes no log-probs to compare theirs with"
        found.append(Alert(step, "mismatch_unchecked", f"{said} {why}", remedy))
    return found
