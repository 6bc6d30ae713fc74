"""verl's presets of the rollout correction by name: `algorithm.rollout_correction`."""

import dataclasses

_GEO, _K3 = ("seq_mean_k1", "0.999_1.001"), ("seq_mean_k3", "0.01")
THRESHOLDS = ("rollout_is_threshold", "rollout_rs_threshold")


@dataclasses.dataclass(frozen=True)
class Preset:
    """Values of the settings of `algorithm` by the same names, and of `actor.loss_mode`."""

    old_logprob: str
    rollout_is: str
    rollout_is_threshold: str
    rollout_rs: str
    rollout_rs_threshold: str
    loss_mode: str  # '': any


def _decoupled(rollout_is: str = "none", rs: tuple[str, str] = ("", ""), *, band: str = "2.0") -> Preset:
    return Preset("correction", rollout_is, band, *rs, loss_mode="")


def _bypass(loss_mode: str, rollout_is: str = "none", rs: tuple[str, str] = ("", ""), *, band: str = "2.0") -> Preset:
    return Preset("bypass", rollout_is, band, *rs, loss_mode=loss_mode)


PRESETS = {
    "disabled": Preset("decoupled", "none", "2.0", "", "", loss_mode=""),
    "decoupled_token_is": _decoupled("token"),
    "decoupled_seq_is": _decoupled("sequence"),
    "decoupled_token_icepop": _decoupled("token", band="0.5_5.0"),
    "decoupled_seq_is_rs": _decoupled("sequence", ("seq_sum_k1", "0.5_2.0")),
    "decoupled_geo_rs": _decoupled(rs=_GEO),
    "decoupled_geo_rs_seq_tis": _decoupled("sequence", _GEO),
    "decoupled_geo_rs_token_tis": _decoupled("token", _GEO),
    "decoupled_k3_rs": _decoupled(rs=_K3),
    "decoupled_k3_rs_seq_tis": _decoupled("sequence", _K3),
    "decoupled_k3_rs_token_tis": _decoupled("token", _K3),
    "bypass_ppo_clip": _bypass("vanilla"),
    "bypass_ppo_clip_geo_rs": _bypass("vanilla", rs=_GEO),
    "bypass_ppo_clip_k3_rs": _bypass("vanilla", rs=_K3),
    "bypass_pg_is": _bypass("gpg", "sequence"),
    "bypass_pg_token_icepop": _bypass("gpg", "token", band="0.5_5.0"),
    "bypass_pg_geo_rs": _bypass("gpg", rs=_GEO),
    "bypass_pg_geo_rs_seq_tis": _bypass("gpg", "sequence", _GEO),
    "bypass_pg_geo_rs_token_tis": _bypass("gpg", "token", _GEO),
}
