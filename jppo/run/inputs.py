"""The inputs of a run, read before it starts anything: model configs, tokenizer, prompts, graders."""

import dataclasses
import functools
from collections.abc import Set
from typing import Any

from jppo import plugins
from jppo.data.memory import AlgorithmMemory, Memory
from jppo.data.prompts import PromptSet, mixture, read_prompts
from jppo.data.stream import user_order
from jppo.data.tokenizer import FILES, check_stop_texts, decode, end_token_ids, load_tokenizer
from jppo.errors import UserError, expanded
from jppo.learner.make import require_optimizers
from jppo.learner.ppo import ModelConfigs
from jppo.models import hf
from jppo.models.config import ModelConfig
from jppo.rewards.make import make_refusal, needed_columns, require_parts
from jppo.rollout.protocol import Agent
from jppo.run.loop import total_steps
from jppo.run.make import make_algorithm, read_models_of_run
from jppo.run.tokenizer import read_tokenizer
from jppo.samples.make import prompts_per_batch, require_given
from jppo.settings import Loop, Settings, parts, template_arguments
from jppo.settings.texts import addresses_by_source


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(ModelConfigs):
    """The inputs of a run, read before it starts anything."""

    tokenizer: Any
    end_tokens: tuple[int, ...]
    train: PromptSet
    val: PromptSet
    sources: tuple[str, ...]  # data_source of every row
    agent: Agent | None = None  # None: single-turn

    def reward_arguments(self) -> dict[str, Any]:
        """Returns the arguments of `make_reward_sum`."""
        return dict(tokenizer=self.tokenizer, sources=self.sources, tool_rewards=_tool_rewards(self.agent))


def require_reward(c: Settings, inputs: Inputs) -> None:
    """Raises a UserError for a part or a rule that settings name and the run's reward lacks; starts nothing."""
    trained = {prompt.data_source for prompt in inputs.train.prompts}
    require_parts(c, inputs.sources, trained=trained, tool_rewards=_tool_rewards(inputs.agent))


def read_inputs(c: Settings, *, weights: bool = True) -> Inputs:
    """Reads and checks all files before a device or a server is used; a forecast needs no `weights`."""
    require_optimizers(c)
    models = read_models_of_run(c, weights=weights)
    require_publishable(c, models.policy)
    tokenizer = read_tokenizer(c, *models.configs)
    if models.reference is not None and c.ref.path != "policy":
        _check_reference_tokens(c.ref.path, tokenizer)
    end_tokens, agent = read_ends_and_agent(c, tokenizer)
    train = mixture(read_training_prompts(c, tokenizer, agent), c.data.mix, batch_size=prompts_per_batch(c))
    if (batch := prompts_per_batch(c)) > len(train.prompts):
        name = "train" if c.data.gen_batch_size is None else "gen"
        raise UserError(f"data.{name}_batch_size={batch} must be at most the number of prompts, {len(train.prompts)}")
    if c.data.sampler:
        ordering = dict(seed=c.trainer.seed, batch_size=prompts_per_batch(c))
        train = dataclasses.replace(train, order_of=user_order(c.data.sampler, train.prompts, **ordering))
    require_given(c, train.prompts)
    train = _with_memory(c, train)
    _require_teachers(c.ref.url, {p.data_source for p in train.prompts})
    val = _read_val(c, tokenizer, agent)
    sources = {p.data_source for p in (*train.prompts, *val.prompts)}
    steps, lengths = total_steps(c, len(train.prompts)), tuple(len(prompt.ids) for prompt in train.prompts)
    return Inputs(
        **vars(models) | {"total_steps": steps, "prompt_lengths": lengths},
        train=train,
        val=val,
        sources=tuple(sorted(sources)),
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        agent=agent,
    )


def read_ends_and_agent(c: Settings, tokenizer: Any) -> tuple[tuple[int, ...], Agent | None]:
    """Returns the tokens that end a response, and what leads the conversations, if any; checks both."""
    check_stop_texts(tokenizer, c.rollout.stop_texts)
    end_tokens = end_token_ids(c.model.path, tokenizer)
    if not (c.rollout.multi_turn.enable or c.rollout.agent):
        return end_tokens, None
    return end_tokens, plugins.load("agents.make").make_agent(c, tokenizer, end_tokens)


def _with_memory(c: Settings, train: PromptSet) -> PromptSet:
    """Returns the prompts with the memory of the algorithm, if it has one, whose functions have passed a first call."""
    algorithm = make_algorithm(c)
    if not algorithm.remembers:
        return train
    if isinstance(train.order_of, Memory):
        raise UserError(
            f"data.sampler={c.data.sampler!r} is a class with a state, and {parts.host_setting(c)} has a memory: a run"
            " has one of them; leave data.sampler empty, and choose prompts by the function `prompts` of the algorithm"
        )
    memory = AlgorithmMemory(
        parts.host_setting(c), train.prompts, init=algorithm.init, choose=algorithm.prompts, columns=algorithm.columns,
        update=algorithm.update, order=train.order_of,
    )  # fmt: skip
    memory.check(prompts_per_batch(c), algorithm.column_names)
    return dataclasses.replace(train, order_of=memory)


def _require_teachers(url: str, sources: Set[str]) -> None:
    """Raises UserError unless the addresses by data source in `ref.url` are those of the training data."""
    teachers = set(addresses_by_source(url))
    if teachers <= {""}:
        return
    if lacking := sources - teachers:
        raise UserError(
            f"ref.url has no address for data_source={min(lacking)!r} of the training rows, only for"
            f" {', '.join(sorted(teachers))}; add {min(lacking)}=ADDRESS"
        )
    if unused := teachers - sources:
        raise UserError(
            f"ref.url has an address for {min(unused)!r}, and no training row has this data_source, only"
            f" {', '.join(sorted(sources))}; leave it out"
        )


def read_test(c: Settings) -> Inputs:
    """Reads the inputs of an evaluation: the policy, with weights, and the test set; no training data."""
    _, policy = hf.read_config(c.model.path, longest=c.data.longest_row)
    require_publishable(c, policy)
    hf.check_weights(c.model.path, policy, head="lm")
    tokenizer = read_tokenizer(c, policy)
    end_tokens, agent = read_ends_and_agent(c, tokenizer)
    val = _read_val(c, tokenizer, agent)
    return Inputs(
        tokenizer=tokenizer,
        end_tokens=end_tokens,
        train=PromptSet([], overlong=0),
        val=val,
        sources=tuple(sorted({p.data_source for p in val.prompts})),
        policy=policy,
        agent=agent,
    )


def read_training_prompts(c: Settings, tokenizer: Any, agent: Agent | None) -> PromptSet:
    """Reads and checks the prompts of data.train_files."""
    arguments = dict[str, Any](max_samples=c.data.train_max_samples) | _prompt_arguments(c, tokenizer, agent)
    return _require_messages(c, read_prompts(c.data.train_files, **arguments))


def _read_val(c: Settings, tokenizer: Any, agent: Agent | None) -> PromptSet:
    arguments = dict[str, Any](max_samples=c.data.val_max_samples, setting="data.val_files")
    return _require_messages(c, read_prompts(c.data.val_files, **arguments, **_prompt_arguments(c, tokenizer, agent)))


def describe_decoding(policy: ModelConfig) -> str | None:
    """Describes how a quantised checkpoint is read; None if it is not quantised."""
    if policy.quantization is None:
        return None
    return f"{policy.quantization} tensors of the checkpoint are read as bfloat16; no publish or export is quantised"


def engine_arguments(inputs: Inputs) -> dict[str, Any]:
    """Returns the engine's arguments for responses: end tokens, decoder and turn loop."""
    arguments = dict(eos_token_ids=inputs.end_tokens, decode=functools.partial(decode, inputs.tokenizer))
    return arguments if inputs.agent is None else arguments | {"talk": inputs.agent.talk}


def _tool_rewards(agent: Agent | None) -> bool:
    return agent is not None and agent.rewards


def _prompt_arguments(c: Settings, tokenizer: Any, agent: Agent | None) -> dict[str, Any]:
    """Returns the arguments of `read_prompts` for the training and the validation set."""
    return dict(
        tokenizer=tokenizer,
        max_prompt_length=c.data.max_prompt_length,
        filter_overlong=c.data.filter_overlong_prompts,
        truncation=c.data.truncation,
        prompt_role=c.data.prompt_role,
        system_prompt=c.data.system_prompt,
        custom_cls=c.data.custom_cls,
        columns=columns_of(c),
        template_arguments=template_arguments(c.data.apply_chat_template_kwargs),
        tools=() if agent is None else agent.schemas,
        needed=needed_columns(c, _tool_rewards(agent)),
        refuse=make_refusal(c),
    )


def _require_messages(c: Settings, prompts: PromptSet) -> PromptSet:
    """Returns the prompts; raises UserError for a text where the chat template renders conversations."""
    m = c.rollout.multi_turn
    text = next((prompt for prompt in prompts.prompts if isinstance(prompt.messages, str)), None)
    if text is not None and m.enable and m.format != "plain":
        raise UserError(
            f"prompt {text.uid} is text, and rollout.multi_turn.format={m.format!r} renders conversations by the chat"
            " template; make the prompts chat messages, or set rollout.multi_turn.format=plain"
        )
    return prompts


def columns_of(c: Settings) -> dict[str, str]:
    """Maps jppo's columns to the data files' columns."""
    d = c.data
    return {"prompt": d.prompt_key, "ground_truth": d.ground_truth_key, "data_source": d.reward_fn_key}


def require_publishable(c: Loop, policy: ModelConfig) -> None:
    """Raises UserError for layers that no SGLang was tried with: its load keeps the old values of tensors silently."""
    parts = {"experts": policy.experts, "latent attention": policy.latent_sizes, "gated delta nets": policy.delta_kind}
    untried = [part for part, config in parts.items() if config is not None]
    if c.rollout.name == "sglang" and untried:
        raise UserError(
            f"rollout.name='sglang': publishing {' and '.join(untried)} of a {policy.family} model to SGLang is"
            " untested, and its load reports no tensor that it left out; set rollout.name to vllm or inprocess"
        )


def _check_reference_tokens(path: str, tokenizer: Any) -> None:
    """Raises a UserError if a token has another id in the reference's tokenizer. A directory may have no tokenizer."""
    local = expanded(path)
    if local.is_dir() and not any((local / name).is_file() for name in FILES):
        return
    reference_ids = load_tokenizer(path).get_vocab()
    for token, number in tokenizer.get_vocab().items():
        if reference_ids.get(token, number) != number:
            raise UserError(
                f"ref.path={path}: a reference reads the policy's token ids, and its tokenizer gives {token!r} the id"
                f" {reference_ids[token]} in place of {number}; use a model with the policy's tokenizer"
            )
