"""The inputs of a run, read before it starts anything: model configs, tokenizer, prompts, graders."""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from jppo.build.agent import Agent, make_agent
from jppo.build.algorithm import make_estimator
from jppo.build.optimizers import require_optimizers
from jppo.data.prompts import PromptSet, mixture, read_prompts
from jppo.data.stream import steps_per_epoch, user_order
from jppo.data.tokenizer import FILES, check_stop_texts, decode, end_token_ids, load_tokenizer
from jppo.errors import expanded
from jppo.models import hf, lora
from jppo.models.config import ModelConfig
from jppo.models.lora import Lora
from jppo.models.params import Head
from jppo.settings import UserError, stop_texts, template_arguments


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The inputs of a run, read before it starts anything."""

    tokenizer: Any
    end_tokens: tuple[int, ...]
    train: PromptSet
    val: PromptSet
    sources: tuple[str, ...]  # data_source of every row
    policy: ModelConfig
    critic: ModelConfig | None = None  # None: the estimator needs none
    reference: ModelConfig | None = None  # None: no KL is used
    adapters: Lora | None = None  # of the policy; None: full fine-tuning
    critic_adapters: Lora | None = None
    agent: Agent | None = None  # None: single-turn
    total_steps: int = 0


def read_inputs(c: ConfigDict) -> Inputs:
    """Reads and checks all files before a device or a server is used."""
    require_optimizers(c)
    policy, critic, reference = read_models(c)
    tokenizer = read_tokenizer(c, *(model for model in (policy, critic, reference) if model is not None))
    if reference is not None and c.ref.path != "policy":
        _check_reference_tokens(c.ref.path, tokenizer)
    check_stop_texts(tokenizer, stop_texts(c.rollout.stop))
    end_tokens = end_token_ids(c.model.path, tokenizer)
    agent = make_agent(c, tokenizer, end_tokens)
    how = dict(max_samples=c.data.train_max_samples) | _reading(c, tokenizer, agent)
    prompts = _with_messages(c, read_prompts(c.data.train_files, **how))
    train = mixture(prompts, c.data.mix, batch_size=prompts_per_batch(c))
    if c.data.gen_batch_size is not None and c.data.gen_batch_size > len(train.prompts):
        raise UserError(
            f"data.gen_batch_size={c.data.gen_batch_size} must be at most the number of prompts, {len(train.prompts)}"
        )
    if c.data.sampler:
        how = dict(seed=c.trainer.seed, batch_size=prompts_per_batch(c))
        train = dataclasses.replace(train, order_of=user_order(c.data.sampler, train.prompts, **how))
    val = read_val(c, tokenizer, agent)
    sources = {p.data_source for p in (*train.prompts, *val.prompts)}
    return Inputs(
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        train=train,
        val=val,
        sources=tuple(sorted(sources)),
        policy=policy,
        critic=critic,
        reference=reference,
        adapters=make_adapters(c),
        critic_adapters=make_adapters(c, c.critic) if critic is not None else None,
        agent=agent,
        total_steps=total_steps(c, len(train.prompts)),
    )


def prompts_per_batch(c: ConfigDict) -> int:
    """Returns the number of prompts sampled together: `data.train_batch_size`, or one gen batch of dynamic sampling."""
    size: int = c.data.train_batch_size if c.data.gen_batch_size is None else c.data.gen_batch_size
    return size


def longest_row(c: ConfigDict) -> int:
    """Returns the tokens of the longest allowed prompt and response together."""
    return int(c.data.max_prompt_length + c.data.max_response_length)


def total_steps(c: ConfigDict, examples: int) -> int:
    """Returns the steps of a run: `trainer.total_training_steps`, or all epochs' steps."""
    steps = c.trainer.total_training_steps
    return steps if steps != -1 else steps_per_epoch(examples, c.data.train_batch_size) * c.trainer.total_epochs


def read_test(c: ConfigDict) -> Inputs:
    """Reads the inputs of an evaluation: the policy, with weights, and the test set; no training data."""
    _, policy = hf.read_config(c.model.path, longest=longest_row(c))
    _require_publishable(c, policy)
    hf.check_weights(c.model.path, policy, head="lm")
    tokenizer = read_tokenizer(c, policy)
    check_stop_texts(tokenizer, stop_texts(c.rollout.stop))
    end_tokens = end_token_ids(c.model.path, tokenizer)
    agent = make_agent(c, tokenizer, end_tokens)
    val = read_val(c, tokenizer, agent)
    return Inputs(
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        train=PromptSet([], overlong=0),
        val=val,
        sources=tuple(sorted({p.data_source for p in val.prompts})),
        policy=policy,
        agent=agent,
    )


def read_val(c: ConfigDict, tokenizer: Any, agent: Agent | None = None) -> PromptSet:
    """Reads the validation prompts."""
    how = dict(max_samples=c.data.val_max_samples, setting="data.val_files")
    return _with_messages(c, read_prompts(c.data.val_files, **how, **_reading(c, tokenizer, agent)))


def describe_decoding(policy: ModelConfig) -> str | None:
    """Describes how a quantised checkpoint is read; None if it is not quantised."""
    if policy.quantization is None:
        return None
    return f"{policy.quantization} tensors of the checkpoint are read as bfloat16; no publish or export is quantised"


def speaking(inputs: Inputs) -> dict[str, Any]:
    """Returns the engine's arguments for responses: end tokens, decoder and turn loop."""
    said = dict(eos_token_ids=inputs.end_tokens, decode=lambda ids: decode(inputs.tokenizer, ids))
    return said if inputs.agent is None else said | {"talk": inputs.agent.talk}


def _reading(c: ConfigDict, tokenizer: Any, agent: Agent | None) -> dict[str, Any]:
    """Returns the arguments that read either prompt set."""
    return dict(
        tokenizer=tokenizer,
        max_prompt_length=c.data.max_prompt_length,
        filter_overlong=c.data.filter_overlong_prompts,
        truncation=c.data.truncation,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        columns=columns_of(c),
        template_arguments=template_arguments(c.data.apply_chat_template_kwargs),
        tools=() if agent is None else agent.schemas,
    )


def _with_messages(c: ConfigDict, prompts: PromptSet) -> PromptSet:
    """Returns the prompts; UserError if a conversation by the chat template begins with a text."""
    m = c.rollout.multi_turn
    text = next((prompt for prompt in prompts.prompts if isinstance(prompt.messages, str)), None)
    if text is not None and m.enable and m.format != "plain":
        raise UserError(
            f"prompt {text.uid} is text, and rollout.multi_turn.format={m.format!r} renders conversations by the chat"
            " template; make the prompts chat messages, or set rollout.multi_turn.format=plain"
        )
    return prompts


def columns_of(c: ConfigDict) -> dict[str, str]:
    """Maps jppo's columns to the data files' columns."""
    return {"prompt": c.data.prompt_key, "data_source": c.data.reward_fn_key}


def read_models(c: ConfigDict) -> tuple[ModelConfig, ModelConfig | None, ModelConfig | None]:
    """Reads the configs of policy, critic and reference and checks that their weights exist."""

    def read(path: str, head: Head, init: str) -> ModelConfig:
        _, cfg = hf.read_config(path, longest=longest_row(c))
        if head == "value":
            cfg = dataclasses.replace(cfg, value_bins=c.critic.value_bins or 1, value_head_std=c.critic.value_head_std)
        if init == "pretrained":
            hf.check_weights(path, cfg, head=head)
        return cfg

    policy = read(c.model.path, "lm", c.model.init)
    _require_publishable(c, policy)
    critic = read(critic_path(c), "value", critic_init(c)) if wants_critic(c) else None
    if not wants_reference(c) or c.ref.url:
        return policy, critic, None
    reference = policy if c.ref.path == "policy" else read(c.ref.path, "lm", "pretrained")
    if reference.vocab_size != policy.vocab_size:
        raise UserError(
            f"ref.path={c.ref.path}: a reference has the policy's vocabulary, {policy.vocab_size} tokens, and this one"
            f" has {reference.vocab_size}; use a model with that vocab_size"
        )
    return policy, critic, reference


def _require_publishable(c: ConfigDict, policy: ModelConfig) -> None:
    """Raises UserError for layers that no SGLang was tried with: its load keeps the old values of tensors silently."""
    parts = {"experts": policy.experts, "latent attention": policy.latent_sizes, "gated delta nets": policy.delta_kind}
    untried = [part for part, found in parts.items() if found is not None]
    if c.rollout.name == "sglang" and untried:
        raise UserError(
            f"rollout.name='sglang': publishing {' and '.join(untried)} of a {policy.family} model to SGLang is"
            " untested, and its load reports no tensor that it left out; set rollout.name to vllm or inprocess"
        )


def critic_path(c: ConfigDict) -> str:
    """Returns the path of the critic's initial weights; the policy's by default."""
    return c.critic.path if c.critic.path else c.model.path


def critic_init(c: ConfigDict) -> str:
    """Returns how the critic starts: by `model.init` on the policy's model; a model of its own is never random."""
    return str(c.model.init) if critic_path(c) == c.model.path else "pretrained"


def make_adapters(c: ConfigDict, own: ConfigDict | None = None) -> Lora | None:
    """Makes the LoRA settings of `model`, or of a section with its `own`; None: full fine-tuning."""
    targets = lora.parse_targets(c.model.target_modules)  # validates unused settings, too
    rank, alpha = c.model.lora_rank, c.model.lora_alpha
    if own is not None:
        rank = rank if own.lora_rank is None else own.lora_rank
        alpha = alpha if own.lora_alpha is None else own.lora_alpha
    return None if rank == 0 else Lora(rank, alpha, targets)


def wants_critic(c: ConfigDict) -> bool:
    """Whether the estimator reads values."""
    return make_estimator(c).critic


def wants_reference(c: ConfigDict) -> bool:
    """Whether a KL is used."""
    return c.algorithm.use_kl_in_reward or c.actor.use_kl_loss


def read_tokenizer(c: ConfigDict, *models: ModelConfig) -> Any:
    """Reads the policy's tokenizer and checks it and the lengths against every model that reads its tokens."""
    tokenizer = load_tokenizer(c.model.path)
    longest = longest_row(c)
    for model in models:
        if len(tokenizer) > model.vocab_size:
            raise UserError(
                f"{c.model.path}: the tokenizer has {len(tokenizer)} tokens, the embedding of a model that reads them"
                f" vocab_size={model.vocab_size}; use the tokenizer that the model was made with"
            )
        if longest > model.max_position_embeddings:
            raise UserError(
                f"data.max_prompt_length+data.max_response_length={longest} must be within the model's"
                f" max_position_embeddings={model.max_position_embeddings}; lower one of them"
            )
    return tokenizer


def _check_reference_tokens(path: str, tokenizer: Any) -> None:
    """Raises a UserError if a token has another id in the reference's tokenizer. A directory may have no tokenizer."""
    local = expanded(path)
    if local.is_dir() and not any((local / name).is_file() for name in FILES):
        return
    theirs = load_tokenizer(path).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if theirs.get(token, number) != number:
            raise UserError(
                f"ref.path={path}: a reference reads the policy's token ids, and its tokenizer gives {token!r} the id"
                f" {theirs[token]} in place of {number}; use a model with the policy's tokenizer"
            )
