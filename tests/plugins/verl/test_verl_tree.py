"""Every key of verl 0.9.1's PPO trainer is the same in jppo, has an equivalent, or has a reason.

`verl_tree.json` has the keys and defaults of the published package's `trainer/config/_generated_ppo_*trainer.yaml`,
with their references resolved; for Megatron, VeOmni and TorchTitan the keys that differ from FSDP's.
"""

import json
import pathlib

import pytest

from jppo import settings
from jppo.plugins.verl import names
from jppo.plugins.verl.translate import translate
from jppo.settings import table

TREES = json.loads((pathlib.Path(__file__).parent / "verl_tree.json").read_text())
KEYS = sorted({key for tree in TREES.values() for key in tree})


def hydra(value) -> str:
    """The value as an override."""
    if isinstance(value, list):
        return f"[{','.join(map(hydra, value))}]"
    return "null" if value is None else repr(value) if isinstance(value, str) else str(value)


def test_every_key_has_a_row():
    assert len(KEYS) > 1200
    assert [key for key in KEYS if names.find_row(names.current_key(key)) is None] == []


def test_every_row_of_a_setting_is_a_key_of_verl():
    """Rows of older versions' keys and of launchers' are the exceptions."""
    older = {
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff",
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_z_loss_coeff",
        "actor_rollout_ref.actor.optim.init_lr_ratio",  # of Automodel's YAML, as the critic's
        "actor_rollout_ref.model.override_config.max_position_embeddings",  # of transformers' config
        "actor_rollout_ref.ref.model.path",
        "critic.optim.init_lr_ratio",
        "actor_rollout_ref.rollout.max_concurrent_requests",
        "algorithm.lam_critic",  # of verl's SAO branch, as the next three
        "algorithm.length_adaptive_lam_alpha",
        "critic.fsdp.freeze_param_patterns",
        "critic.veomni.freeze_param_patterns",
        "algorithm.gdpo_reward_keys",  # of the dataclass alone, as the next
        "algorithm.gdpo_reward_weights",
        "data.custom_cls.path",
        "reward.reward_model.max_length",
        "reward.reward_model.micro_batch_size",
        "reward.reward_model.micro_batch_size_per_gpu",
        "trainer.master_addr",
        "trainer.max_ckpt_to_keep",
        "trainer.node_rank",
        "actor_rollout_ref.rollout.n_agent",  # of forks, as the next two
        "data.n_samples",
        "agent_grpo.n",
        "actor_rollout_ref.actor.use_token_level_loss",
    }
    current = {names.current_key(key) for key in KEYS} | set(KEYS)
    rows = {name.key for name in names.KEYS if name.kind == "same" and not name.key.startswith("tuning.")}
    groups = {key for key in rows if any(known.startswith(f"{key}.") for known in current)}
    assert rows - current - groups - older <= {"reward.reward_kwargs.overlong_buffer_cfg.len"}


@pytest.mark.parametrize("engine", TREES)
def test_verls_defaults_change_nothing(engine):
    """A command that gives every key at its default asks for nothing that jppo lacks, and is an empty command."""
    unset = ("???", "~/", "checkpoints/", "images", "videos", "audios")  # paths, and keys that verl wants to be given
    words = [f"{key}={hydra(value)}" for key, value in TREES[engine].items() if not str(value).startswith(unset)]
    found, nothing = translate(words), {**table.by_name(settings.default()), **translate([]).settings}
    assert [line for line in found.lines if line.kind in ("unknown", "missing")] == []
    changed = {name: value for name, value in found.settings.items() if nothing[name] != value}
    own = {"actor.calculate_entropy": False, "reward.workers": 8}  # verl's, which from_verl leaves at jppo's
    own |= {"critic.ppo_mini_batch_size": 256, "critic.loss_agg_mode": "token-mean"}  # the actor's
    own |= {"mesh.fsdp": 1, "mesh.data": -1} if engine == "torchtitan" else {}  # data_parallel_shard_size is 1
    decays = {"veomni": "cosine", "torchtitan": "linear"}
    own |= {f"{model}.lr_scheduler_type": decays[engine] for model in ("actor", "critic") if engine in decays}
    assert {name: value for name, value in changed.items() if own.get(name) != value} == {}
