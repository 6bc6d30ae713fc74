"""Rules between the settings of learning: batches, losses, the KL, the correction, rows, memory."""

from collections.abc import Callable, Iterator
from functools import partial

from jppo.errors import UserError
from jppo.settings import parts
from jppo.settings.table import TABLE, Common, Loop, PairTraining, PreferenceTuning, Settings, optimizers, value_of
from jppo.settings.table_training import Critic, Model, Optimizer
from jppo.settings.texts import rejection_rules


def training_rules(config: Common) -> Iterator[Callable[[], object]]:
    """Yields the rules between the settings of any training as functions, each of which raises UserError."""
    if isinstance(config, Settings):
        ppo_rules = (
            parts.options,
            _check_group_size,
            _check_critic_settings,
            _check_estimator_inputs,
            _check_given_responses,
            _check_turn_discount,
            _check_value_terms,
            _check_kl,
            _check_served_reference,
            _check_teacher,
        )
        for rule in (*ppo_rules, _check_correction, _check_prompt_order):
            yield partial(rule, config)
        for section in ("actor", "critic"):
            yield partial(_check_mini_batch, config, section)
    if isinstance(config, Loop):
        for shared in (_check_value_range, _check_policy_loss, _check_reference, _check_reference_offload):
            yield partial(shared, config)
    for name, optimizer in optimizers(config).items():
        yield partial(_check_betas, name, optimizer)
        yield partial(_check_warmup, name, optimizer)
        yield partial(_check_master_dtype, config, name, optimizer)
    for common in (_check_margin, _check_packing, _check_dropout, _check_row_lengths):
        yield partial(common, config)


def _check_group_size(config: Settings) -> None:
    n = config.rollout.n
    if parts.estimator(config).compares and n < 2:
        raise UserError(
            f"{parts.estimate_setting(config)} compares the samples of a prompt, and rollout.n={n} generates one;"
            " raise rollout.n, or take gae, remax, reinforce_plus_plus or reinforce_no_baseline"
        )


def _check_critic_settings(config: Settings) -> None:
    warmup = config.trainer.critic_warmup
    if parts.estimator(config).critic:
        return
    estimate = parts.estimate_setting(config)
    if warmup > 0:
        raise UserError(
            f"trainer.critic_warmup={warmup} trains a critic, and {estimate} has none; set it to 0, or take gae"
        )
    critic_names = ("lam", "value_norm_decay", "value_bins", "value_head_std")
    for setting in ("algorithm.lam_alpha", *(f"critic.{leaf}" for leaf in critic_names)):
        value = value_of(config, setting)
        if value != TABLE[setting].default:
            raise UserError(
                f"{setting}={value} is read with a critic, and {estimate} has none; leave it at"
                f" {TABLE[setting].default}, or take gae"
            )


def _check_estimator_inputs(config: Settings) -> None:
    a, estimator = config.algorithm, parts.estimator(config)
    if estimator.parts and a.use_kl_in_reward:
        raise UserError(
            f"algorithm.use_kl_in_reward=True: {parts.estimate_setting(config)} reads parts of the reward, without the"
            " KL; set actor.use_kl_loss=True instead"
        )
    if estimator.old_logits and a.old_logprob == "bypass":
        raise UserError(
            f"algorithm.old_logprob='bypass': {parts.estimate_setting(config)} reads the old policy's probabilities of"
            " all tokens, and bypass has no pass for them; set decoupled or correction"
        )


def _check_given_responses(config: Settings) -> None:
    if parts.estimator(config).given is None:
        return
    r, several, switch = config.rollout, ("makes responses of several turns", "one"), "set it to False"
    for setting, is_set, (does, have), remedy in (
        ("algorithm.old_logprob='bypass'", config.algorithm.old_logprob == "bypass",
         ("takes the engine's log-probs", "none"), "set decoupled or correction"),
        ("rollout.mask_replay=True", r.mask_replay, ("replays the engine's kept tokens", "none"), switch),
        ("rollout.routing_replay=True", r.routing_replay, ("replays the engine's experts", "none"), switch),
        ("rollout.multi_turn.enable=True", r.multi_turn.enable, several, switch),
        (f"rollout.agent={r.agent!r}", r.agent, several, "leave it empty"),
    ):  # fmt: skip
        if is_set:
            raise UserError(
                f"{setting} {does}, and the responses that {parts.host_setting(config)} gives have {have}; {remedy}"
            )


def _check_turn_discount(config: Settings) -> None:
    if config.algorithm.gamma_by != "turn":
        return
    if not (config.rollout.multi_turn.enable or config.rollout.agent):
        raise UserError(
            "algorithm.gamma_by='turn' discounts between the turns of a conversation, and"
            " rollout.multi_turn.enable is False; set it to True, or algorithm.gamma_by to token"
        )
    if not parts.estimator(config).by_turn:
        raise UserError(
            f"algorithm.gamma_by='turn': {parts.estimate_setting(config)} does not discount; leave it at token, or take"
            " gae or reinforce_plus_plus"
        )


def _check_value_range(config: Loop) -> None:
    low, high = config.critic.value_range
    if not low < high:
        raise UserError(f"critic.value_range={(low, high)} must be a lower and a higher number, such as (-5.0, 5.0)")


def _check_value_terms(config: Settings) -> None:
    if parts.policy_loss(config).value_terms and not parts.estimator(config).critic:
        raise UserError(
            f"{parts.host_setting(config)}: its value_terms are of a critic, and no function of an advantage reads"
            " `value`; read it, or leave them out"
        )


def _check_policy_loss(config: Loop) -> None:
    loss = parts.policy_loss(config)
    reference = {"kl", "ref_logprob"}.intersection(loss.loss_reads)
    if reference and not config.actor.use_kl_loss:
        raise UserError(
            f"{parts.loss_setting(config)}: a term reads {min(reference)}, and actor.use_kl_loss=False has no reference"
            " for it; set it to True, with actor.kl_loss_coef=0.0 if your term is all"
        )
    mode, needed = config.actor.loss_agg_mode, loss.aggregation
    if needed is not None and mode not in ("token-mean", needed):
        raise UserError(
            f"actor.loss_agg_mode={mode!r}: {parts.loss_setting(config)} is always averaged by {needed}; set that"
        )


def _check_prompt_order(config: Settings) -> None:
    """Raises UserError where two settings choose the prompts of a step."""
    d = config.data
    if d.sampler and d.mix:
        raise UserError(
            f"data.sampler={d.sampler!r} orders all prompts, and data.mix={d.mix!r} samples them by weight; leave one"
            " empty"
        )
    order = f"data.sampler={d.sampler!r}" if d.sampler else f"data.mix={d.mix!r}"
    if (d.sampler or d.mix) and parts.estimator(config).prompts is not None:
        raise UserError(
            f"{order} chooses the prompts of a step, and so does the function `prompts` of"
            f" {parts.host_setting(config)}; leave {order.partition('=')[0]} empty, or `prompts` out"
        )


def _check_reference(config: Loop) -> None:
    kl_settings, actor = list[str](), config.actor
    if isinstance(config, Settings) and config.algorithm.use_kl_in_reward:
        kl_settings += [f"algorithm.use_kl_in_reward=True with algorithm.kl_penalty={config.algorithm.kl_penalty!r}"]
    kl_settings += [f"actor.use_kl_loss=True with actor.kl_loss_type={actor.kl_loss_type!r}"] * actor.use_kl_loss
    if kl_settings and not config.ref.path and not config.ref.url:
        raise UserError(
            f"{' and '.join(kl_settings)}: a KL needs a reference, and ref.path is empty; give a model's path, or"
            " ref.path=policy for the initial policy"
        )


def _check_kl(config: Settings) -> None:
    a = config.algorithm
    if a.use_kl_in_reward and a.kl_penalty == "forward_kl_topk":
        raise UserError(
            "algorithm.kl_penalty='forward_kl_topk' is equal for all tokens that could have been sampled; put it into"
            " the loss with actor.use_kl_loss=True and actor.kl_loss_type=forward_kl_topk, and take kl here"
        )
    if a.kl_ctrl_type == "adaptive" and not a.use_kl_in_reward:
        raise UserError(
            "algorithm.kl_ctrl_type='adaptive' controls the KL in the reward, and algorithm.use_kl_in_reward is False;"
            " set it to True"
        )


def _check_served_reference(config: Settings) -> None:
    a, actor, url = config.algorithm, config.actor, config.ref.url
    if not url:
        return
    prefix = "ref.url has the reference on a server"
    if config.ref.path not in ("", "policy"):
        raise UserError(f"{prefix}, and ref.path={config.ref.path!r} names another; leave one of them out")
    if not a.use_kl_in_reward and not actor.use_kl_loss:
        raise UserError(f"{prefix}, and no KL to it is used; set algorithm.use_kl_in_reward=True")
    for name, is_used, kind in (
        ("algorithm.kl_penalty", a.use_kl_in_reward, a.kl_penalty),
        ("actor.kl_loss_type", actor.use_kl_loss, actor.kl_loss_type),
    ):
        if is_used and kind.startswith(("full", "forward")):
            raise UserError(
                f"{prefix}, which has log-probs of sampled tokens alone, and {name}={kind!r} needs all; take kl, or"
                " load the model on the mesh by ref.path"
            )
    if config.rollout.temperature != 1:
        raise UserError(
            f"{prefix}, where log-probs are at temperature 1, and rollout.temperature={config.rollout.temperature}; set"
            " that to 1, or load the model on the mesh by ref.path"
        )


def _check_teacher(config: Settings) -> None:
    a = config.algorithm
    if parts.estimator(config).scored:
        return
    prefix = f"{parts.estimate_setting(config)} learns from a teacher alone"
    if not a.use_kl_in_reward and not config.actor.use_kl_loss:
        raise UserError(
            f"{prefix}, and no KL to it is used; set algorithm.use_kl_in_reward=True or actor.use_kl_loss=True"
        )
    if config.ref.path == "policy" and not config.ref.url:
        raise UserError(
            f"{prefix}, and ref.path='policy' is the initial policy, which has nothing to teach; set it to the"
            " teacher's directory"
        )
    if a.use_kl_in_reward and a.kl_penalty.startswith("full") and a.gamma == 0:
        raise UserError(
            f"algorithm.kl_penalty={a.kl_penalty!r} is equal for all tokens that could have been sampled, so with"
            f" algorithm.gamma={a.gamma} none of them is preferred; take kl, or put it into the loss with"
            " algorithm.use_kl_in_reward=False and actor.use_kl_loss=True"
        )


def _check_correction(config: Settings) -> None:
    a = config.algorithm
    rejects = bool(rejection_rules(a.rollout_rs, a.rollout_rs_threshold))
    corrects = a.rollout_is != "none" or rejects
    if corrects and a.old_logprob == "decoupled":
        raise UserError(
            f"algorithm.rollout_is={a.rollout_is!r} and algorithm.rollout_rs={a.rollout_rs!r} belong to"
            f" algorithm.old_logprob='correction', which is {a.old_logprob!r}; set it, or leave them out"
        )
    if a.rollout_is != "none" and a.old_logprob == "bypass":
        pair = f"algorithm.rollout_is={a.rollout_is!r} with algorithm.old_logprob='bypass'"
        if parts.policy_loss(config).ratio:
            raise UserError(
                f"{pair}: the ratio of {parts.loss_setting(config)} is the importance weight already; set rollout_is"
                " to none, or actor.loss_mode=gpg"
            )
        if a.rollout_is_batch_normalize:
            raise UserError(
                f"{pair} and algorithm.rollout_is_batch_normalize=True: the mean of weights that change with every"
                " mini-batch is not known before its gradient; set it to False, or old_logprob=correction"
            )
    if a.old_logprob == "correction" and not corrects:
        raise UserError(
            "algorithm.old_logprob='correction' corrects nothing yet; set algorithm.rollout_is to token or sequence,"
            " or algorithm.rollout_rs to a rule such as token_k1"
        )


def _check_mini_batch(config: Settings, section: str) -> None:
    batch, mini = config.data.train_batch_size * config.rollout.n, value_of(config, f"{section}.ppo_mini_batch_size")
    if mini is not None and batch % mini:
        divisor = max(d for d in range(1, min(mini, batch) + 1) if batch % d == 0)
        raise UserError(
            f"{section}.ppo_mini_batch_size={mini} must divide data.train_batch_size*rollout.n={batch}; try {divisor}"
        )


def _check_betas(section: str, optimizer: Optimizer) -> None:
    betas, usual = tuple(optimizer.betas), TABLE[f"{section}.betas"].default
    if optimizer.optimizer == "adafactor" and betas != usual:
        raise UserError(f"{section}.betas={betas} is not read by {section}.optimizer='adafactor'; leave it at {usual}")


def _check_warmup(section: str, optimizer: Optimizer) -> None:
    steps, ratio = optimizer.lr_warmup_steps, optimizer.lr_warmup_steps_ratio
    if steps >= 0 and ratio > 0:
        raise UserError(
            f"{section}.lr_warmup_steps={steps} and {section}.lr_warmup_steps_ratio={ratio} both set the length of the"
            " warm-up; leave one at its default"
        )


def _check_master_dtype(config: Common, section: str, optimizer: Optimizer) -> None:
    if optimizer.master_dtype == "float32":
        return
    critic_rank = optimizer.lora_rank if isinstance(optimizer, Critic) else None
    rank = config.model.lora_rank if critic_rank is None else critic_rank
    if config.model.param_dtype == "float32" or rank:
        part = f"adapters of rank {rank} are" if rank else "model.param_dtype='float32' is"
        raise UserError(
            f"{section}.master_dtype='bfloat16': {part} float32, and steps in less would lose precision; leave it at"
            " 'float32'" + ("" if rank else ", or set model.param_dtype=bfloat16")
        )


def _check_margin(config: Common) -> None:
    if isinstance(config, PairTraining) and config.loss.margin and config.loss.margin_column:
        raise UserError(
            f"loss.margin={config.loss.margin} and loss.margin_column={config.loss.margin_column!r} both set the margin"
            " of a pair; leave one at its default"
        )


def _check_packing(config: Common) -> None:
    samples = config.rollout.n if isinstance(config, Loop) else 1
    if config.data.packing == "prefix" and samples < 2:
        raise UserError(
            "data.packing='prefix' shares a prompt between its samples, and here each has one; raise rollout.n in PPO,"
            " or take buckets"
        )


def _check_dropout(config: Common) -> None:
    dropout = config.model.lora_dropout if isinstance(config.model, Model) else 0.0
    if dropout and config.data.packing == "prefix":
        raise UserError(
            f"model.lora_dropout={dropout}: samples that share a prompt (data.packing='prefix') would share its"
            " dropout; take buckets"
        )
    if dropout and isinstance(config, PreferenceTuning):
        raise UserError(f"model.lora_dropout={dropout}: DPO compares pairs without dropout; set it to 0")


def _check_row_lengths(config: Common) -> None:
    section = "actor" if isinstance(config, Loop) else "optim"
    longest = config.data.longest_row
    tokens, row = value_of(config, f"{section}.max_tokens_per_device"), config.data.max_tokens_per_row
    micro = f"{section}.max_tokens_per_device"
    if section == "optim" and config.model.remat == "auto":
        raise UserError(
            "model.remat='auto' is decided by jppo.train alone; set none, dots, attention or full: the dry run says"
            " what fits"
        )
    if row != -1 and row < longest:
        raise _make_length_error("data.max_tokens_per_row", row, longest, 1)
    if tokens == -1 and section == "actor":
        return
    # Devices that share a row; if mesh.sequence is the remaining devices, their number is not known yet.
    share = longest if config.mesh.sequence == -1 else config.mesh.sequence
    if tokens * share < longest:
        raise _make_length_error(micro, tokens, longest, share)
    if tokens * share < row:
        raise UserError(f"{micro}={tokens} must hold a row, data.max_tokens_per_row={row}; raise {micro}")


def _make_length_error(name: str, value: int, longest: int, share: int) -> UserError:
    """Makes the error about a row or micro-batch that is too short for the `longest` sequence."""
    shared = f", on mesh.sequence={share} devices each" if 1 < share < longest else ""
    return UserError(
        f"{name}={value} must hold a prompt and a response, data.max_prompt_length"
        f"+data.max_response_length={longest}{shared}; try {-(-longest // share)}"
    )


def _check_reference_offload(config: Loop) -> None:
    if not config.ref.param_offload or config.actor.param_offload:
        return
    if config.model.lora_rank and config.ref.path == "policy":
        raise UserError(
            "ref.param_offload=True: with adapters (model.lora_rank) the reference is the policy's own base, which"
            " actor.param_offload moves; set that, or leave ref.param_offload at False"
        )
