"""The models of a run: what their directories describe, their adapters, and what is offloaded to the host."""

import dataclasses

import jax
from jax.sharding import Mesh

from jppo.errors import UserError
from jppo.learner.ppo import ModelConfigs
from jppo.learner.sharding import require_divisible
from jppo.models import hf, lora, placing
from jppo.models.config import ModelConfig
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.settings import Common, Critic, Model, Settings, parts


def read_models(c: Settings, *, weights: bool = True) -> tuple[ModelConfig, ModelConfig | None, ModelConfig | None]:
    """Reads the configs of policy, critic and reference and checks the headers of their `weights`."""

    def read(path: str, head: Head, init: str) -> ModelConfig:
        _, cfg = hf.read_config(path, longest=c.data.longest_row)
        if head == "value":
            cfg = dataclasses.replace(cfg, value_bins=c.critic.value_bins or 1, value_head_std=c.critic.value_head_std)
        if weights and init == "pretrained":
            hf.check_weights(path, cfg, head=head)
        return cfg

    policy = read(c.model.path, "lm", c.model.init)
    critic = read(path_of_critic(c), "value", critic_init(c)) if wants_critic(c) else None
    if not wants_reference(c) or c.ref.url:
        return policy, critic, None
    reference = policy if c.ref.path == "policy" else read(c.ref.path, "lm", "pretrained")
    if reference.vocab_size != policy.vocab_size:
        raise UserError(
            f"ref.path={c.ref.path}: a reference has the policy's vocabulary, {policy.vocab_size} tokens, and this one"
            f" has {reference.vocab_size}; use a model with that vocab_size"
        )
    return policy, critic, reference


def require_models_fit(inputs: ModelConfigs, mesh: Mesh) -> None:
    """Runs `require_divisible` for every model of a run, before a server starts."""
    for cfg in (inputs.policy, inputs.critic, inputs.reference):
        if cfg is not None:
            require_divisible(cfg, mesh)


def path_of_critic(c: Settings) -> str:
    """Returns the path of the critic's initial weights; the policy's by default."""
    return c.critic.path if c.critic.path else c.model.path


def critic_init(c: Settings) -> str:
    """Returns how the critic starts: by `model.init` on the policy's model; a model of its own is never random."""
    return c.model.init if path_of_critic(c) == c.model.path else "pretrained"


def make_adapters(c: Common, own: Critic | None = None) -> Lora | None:
    """Makes the LoRA settings of `model`, or of a section with its `own`; None: full fine-tuning."""
    targets = lora.parse_targets(c.model.target_modules)  # validates unused settings, too
    rank, alpha = c.model.lora_rank, c.model.lora_alpha
    if own is not None:
        rank = rank if own.lora_rank is None else own.lora_rank
        alpha = alpha if own.lora_alpha is None else own.lora_alpha
    dropout = c.model.lora_dropout if own is None and isinstance(c.model, Model) else 0.0
    adapters = None if rank == 0 else Lora(rank, alpha, targets, dropout, c.model.base_quantization)
    if own is None and adapters is not None and isinstance(c.model, Model) and c.model.lora_adapter_path:
        hf.adapter_slots(c.model.lora_adapter_path, adapters)
    return adapters


def wants_critic(c: Settings) -> bool:
    """Whether the estimator reads values."""
    return parts.estimator(c).critic


def wants_reference(c: Settings) -> bool:
    """Whether a KL is used."""
    return c.algorithm.use_kl_in_reward or c.actor.use_kl_loss


SETTINGS = {
    "policy": ("actor", "param_offload"),
    "policy's optimizer": ("actor", "optimizer_offload"),
    "critic": ("critic", "param_offload"),
    "critic's optimizer": ("critic", "optimizer_offload"),
    "reference": ("ref", "param_offload"),
    "optimizer": ("optim", "optimizer_offload"),
}


def offloaded_parts(c: Common) -> list[str]:
    """Returns the parts to offload, named as in SETTINGS."""
    there = {part: getattr(c, section, None) for part, (section, _) in SETTINGS.items()}
    return [part for part, (_, leaf) in SETTINGS.items() if there[part] is not None and getattr(there[part], leaf)]


def require_host(c: Common, device: jax.Device) -> None:
    """Raises UserError where a part is to be offloaded and the devices have no host memory kind."""
    for part in offloaded_parts(c):
        if placing.host_kind(device) is None:
            known = ", ".join(memory.kind for memory in device.addressable_memories())
            raise UserError(
                f"{'.'.join(SETTINGS[part])}=True: {device.device_kind} has no memory of the host to copy from"
                f" ({placing.KINDS[0]}), only {known}; leave it at False"
            )


def describe_offload(c: Common, inputs: ModelConfigs | None, device: jax.Device) -> str | None:
    """Returns a line on the offloaded parts; None without any. `inputs` of PPO tell which parts exist."""
    there = offloaded_parts(c)
    if inputs is not None and inputs.critic is None:
        there = [part for part in there if not part.startswith("critic")]
    if inputs is not None and inputs.reference is None:
        there = [part for part in there if part != "reference"]
    if not there:
        return None
    same = "; on a CPU that is the same memory, and nothing is gained" if device.platform == "cpu" else ""
    return f"offloaded to {placing.host_kind(device)} memory between their uses: {', '.join(there)}{same}"
