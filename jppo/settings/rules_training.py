"""Rules between the settings of learning: batches, losses, the KL, the correction, rows, memory.

Each function yields the texts of errors, one for each rule that the settings break.
"""

from collections.abc import Iterator

from jppo.settings import parts
from jppo.settings.table import TABLE, Common, Loop, PairTraining, PreferenceTuning, Settings, optimizers, value_of
from jppo.settings.table_training import Critic, Model, Optimizer
from jppo.settings.texts import rejection_rules


def training_rules(config: Common) -> Iterator[Iterator[str]]:
    """Yields the rules between the settings of any training."""
    if isinstance(config, Settings):
        yield _estimator_rules(config)
        yield _given_rules(config)
        yield _reward_kl_rules(config)
        yield _served_reference_rules(config)
        yield _teacher_rules(config)
        yield _correction_rules(config)
        yield _step_rules(config)
    if isinstance(config, Loop):
        yield _loss_rules(config)
        yield _reference_rules(config)
    for name, optimizer in optimizers(config).items():
        yield _optimizer_rules(config, name, optimizer)
    yield _example_rules(config)
    yield _row_rules(config)


def _estimator_rules(config: Settings) -> Iterator[str]:
    """Yields settings that do not go with the advantage estimator."""
    a, estimator, estimate = config.algorithm, parts.estimator(config), parts.estimate_setting(config)
    n, warmup = config.rollout.n, config.trainer.critic_warmup
    if estimator.compares and n < 2:
        yield (
            f"{estimate} compares the samples of a prompt, and rollout.n={n} generates one; raise rollout.n, or take"
            " gae, remax, reinforce_plus_plus or reinforce_no_baseline"
        )
    if warmup > 0 and not estimator.critic:
        yield f"trainer.critic_warmup={warmup} trains a critic, and {estimate} has none; set it to 0, or take gae"
    critic_names = ("lam", "value_norm_decay", "value_bins", "value_head_std")
    for setting in ("algorithm.lam_alpha", *(f"critic.{leaf}" for leaf in critic_names)):
        value, default = value_of(config, setting), TABLE[setting].default
        if value != default and not estimator.critic:
            yield (
                f"{setting}={value} is read with a critic, and {estimate} has none; leave it at {default}, or take gae"
            )
    if estimator.parts and a.use_kl_in_reward:
        yield (
            f"algorithm.use_kl_in_reward=True: {estimate} reads parts of the reward, without the KL; set"
            " actor.use_kl_loss=True instead"
        )
    if estimator.old_logits and a.old_logprob == "bypass":
        yield (
            f"algorithm.old_logprob='bypass': {estimate} reads the old policy's probabilities of all tokens, and bypass"
            " has no pass for them; set decoupled or correction"
        )
    if a.gamma_by == "turn" and not estimator.by_turn:
        yield (
            f"algorithm.gamma_by='turn': {estimate} does not discount; leave it at token, or take gae or"
            " reinforce_plus_plus"
        )
    if parts.policy_loss(config).value_terms and not estimator.critic:
        yield (
            f"{parts.host_setting(config)}: its value_terms are of a critic, and no function of an advantage reads"
            " `value`; read it, or leave them out"
        )
    order = f"data.sampler={config.data.sampler!r}" if config.data.sampler else f"data.mix={config.data.mix!r}"
    if (config.data.sampler or config.data.mix) and estimator.prompts is not None:
        yield (
            f"{order} chooses the prompts of a step, and so does the function `prompts` of"
            f" {parts.host_setting(config)}; leave {order.partition('=')[0]} empty, or `prompts` out"
        )


def _given_rules(config: Settings) -> Iterator[str]:
    """Yields settings that need of every response what given ones have not."""
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
            given = parts.host_setting(config)
            yield f"{setting} {does}, and the responses that {given} gives have {have}; {remedy}"


def _reward_kl_rules(config: Settings) -> Iterator[str]:
    """Yields settings of a KL in the reward that have no effect."""
    a = config.algorithm
    if a.use_kl_in_reward and a.kl_penalty == "forward_kl_topk":
        yield (
            "algorithm.kl_penalty='forward_kl_topk' is equal for all tokens that could have been sampled; put it into"
            " the loss with actor.use_kl_loss=True and actor.kl_loss_type=forward_kl_topk, and take kl here"
        )
    if a.kl_ctrl_type == "adaptive" and not a.use_kl_in_reward:
        yield (
            "algorithm.kl_ctrl_type='adaptive' controls the KL in the reward, and algorithm.use_kl_in_reward is False;"
            " set it to True"
        )


def _served_reference_rules(config: Settings) -> Iterator[str]:
    """Yields settings that a reference on a server, `ref.url`, excludes."""
    a, actor = config.algorithm, config.actor
    prefix = "ref.url has the reference on a server"
    if not config.ref.url:
        return
    if config.ref.path not in ("", "policy"):
        yield f"{prefix}, and ref.path={config.ref.path!r} names another; leave one of them out"
    if not a.use_kl_in_reward and not actor.use_kl_loss:
        yield f"{prefix}, and no KL to it is used; set algorithm.use_kl_in_reward=True"
    for name, is_used, kind in (
        ("algorithm.kl_penalty", a.use_kl_in_reward, a.kl_penalty),
        ("actor.kl_loss_type", actor.use_kl_loss, actor.kl_loss_type),
    ):
        if is_used and kind.startswith(("full", "forward")):
            yield (
                f"{prefix}, which has log-probs of sampled tokens alone, and {name}={kind!r} needs all; take kl, or"
                " load the model on the mesh by ref.path"
            )
    if config.rollout.temperature != 1:
        yield (
            f"{prefix}, where log-probs are at temperature 1, and rollout.temperature={config.rollout.temperature}; set"
            " that to 1, or load the model on the mesh by ref.path"
        )


def _teacher_rules(config: Settings) -> Iterator[str]:
    """Yields settings by which a policy that reads no score learns nothing from its teacher."""
    a = config.algorithm
    if parts.estimator(config).scored:
        return
    prefix = f"{parts.estimate_setting(config)} learns from a teacher alone"
    if not a.use_kl_in_reward and not config.actor.use_kl_loss:
        yield f"{prefix}, and no KL to it is used; set algorithm.use_kl_in_reward=True or actor.use_kl_loss=True"
    if config.ref.path == "policy" and not config.ref.url:
        yield (
            f"{prefix}, and ref.path='policy' is the initial policy, which has nothing to teach; set it to the"
            " teacher's directory"
        )
    if a.use_kl_in_reward and a.kl_penalty.startswith("full") and a.gamma == 0:
        yield (
            f"algorithm.kl_penalty={a.kl_penalty!r} is equal for all tokens that could have been sampled, so with"
            f" algorithm.gamma={a.gamma} none of them is preferred; take kl, or put it into the loss with"
            " algorithm.use_kl_in_reward=False and actor.use_kl_loss=True"
        )


def _correction_rules(config: Settings) -> Iterator[str]:
    """Yields combinations of old log-probs and their correction that exclude each other."""
    a = config.algorithm
    corrects = a.rollout_is != "none" or bool(rejection_rules(a.rollout_rs, a.rollout_rs_threshold))
    if corrects and a.old_logprob == "decoupled":
        yield (
            f"algorithm.rollout_is={a.rollout_is!r} and algorithm.rollout_rs={a.rollout_rs!r} belong to"
            f" algorithm.old_logprob='correction', which is {a.old_logprob!r}; set it, or leave them out"
        )
    if a.old_logprob == "correction" and not corrects:
        yield (
            "algorithm.old_logprob='correction' corrects nothing yet; set algorithm.rollout_is to token or sequence,"
            " or algorithm.rollout_rs to a rule such as token_k1"
        )
    if a.rollout_is == "none" or a.old_logprob != "bypass":
        return
    pair = f"algorithm.rollout_is={a.rollout_is!r} with algorithm.old_logprob='bypass'"
    if parts.policy_loss(config).ratio:
        yield (
            f"{pair}: the ratio of {parts.loss_setting(config)} is the importance weight already; set rollout_is"
            " to none, or actor.loss_mode=gpg"
        )
    elif a.rollout_is_batch_normalize:
        yield (
            f"{pair} and algorithm.rollout_is_batch_normalize=True: the mean of weights that change with every"
            " mini-batch is not known before its gradient; set it to False, or old_logprob=correction"
        )


def _step_rules(config: Settings) -> Iterator[str]:
    """Yields faults of the prompts, the turns and the mini-batches of a step."""
    d, multi_turn = config.data, config.rollout.multi_turn
    if config.algorithm.gamma_by == "turn" and not (multi_turn.enable or config.rollout.agent):
        yield (
            "algorithm.gamma_by='turn' discounts between the turns of a conversation, and"
            " rollout.multi_turn.enable is False; set it to True, or algorithm.gamma_by to token"
        )
    if d.sampler and d.mix:
        yield (
            f"data.sampler={d.sampler!r} orders all prompts, and data.mix={d.mix!r} samples them by weight; leave one"
            " empty"
        )
    batch = d.train_batch_size * config.rollout.n
    for section in ("actor", "critic"):
        mini = value_of(config, f"{section}.ppo_mini_batch_size")
        if mini is not None and batch % mini:
            divisor = max(size for size in range(1, min(mini, batch) + 1) if batch % size == 0)
            yield (
                f"{section}.ppo_mini_batch_size={mini} must divide data.train_batch_size*rollout.n={batch}; try"
                f" {divisor}"
            )


def _loss_rules(config: Loop) -> Iterator[str]:
    """Yields settings that do not go with the losses of policy and critic."""
    low, high = config.critic.value_range
    if not low < high:
        yield f"critic.value_range={(low, high)} must be a lower and a higher number, such as (-5.0, 5.0)"
    loss = parts.policy_loss(config)
    reference = {"kl", "ref_logprob"}.intersection(loss.loss_reads)
    if reference and not config.actor.use_kl_loss:
        yield (
            f"{parts.loss_setting(config)}: a term reads {min(reference)}, and actor.use_kl_loss=False has no reference"
            " for it; set it to True, with actor.kl_loss_coef=0.0 if your term is all"
        )
    mode, needed = config.actor.loss_agg_mode, loss.aggregation
    if needed is not None and mode not in ("token-mean", needed):
        yield f"actor.loss_agg_mode={mode!r}: {parts.loss_setting(config)} is always averaged by {needed}; set that"


def _reference_rules(config: Loop) -> Iterator[str]:
    """Yields a KL without a reference, and an offload that moves nothing."""
    kl_settings, actor, ref = list[str](), config.actor, config.ref
    if isinstance(config, Settings) and config.algorithm.use_kl_in_reward:
        kl_settings += [f"algorithm.use_kl_in_reward=True with algorithm.kl_penalty={config.algorithm.kl_penalty!r}"]
    kl_settings += [f"actor.use_kl_loss=True with actor.kl_loss_type={actor.kl_loss_type!r}"] * actor.use_kl_loss
    if kl_settings and not ref.path and not ref.url:
        yield (
            f"{' and '.join(kl_settings)}: a KL needs a reference, and ref.path is empty; give a model's path, or"
            " ref.path=policy for the initial policy"
        )
    shares_base = config.model.lora_rank and ref.path == "policy"
    if ref.param_offload and shares_base and not actor.param_offload:
        yield (
            "ref.param_offload=True: with adapters (model.lora_rank) the reference is the policy's own base, which"
            " actor.param_offload moves; set that, or leave ref.param_offload at False"
        )


def _optimizer_rules(config: Common, section: str, optimizer: Optimizer) -> Iterator[str]:
    """Yields faults of a section with an optimizer."""
    betas, usual = tuple(optimizer.betas), TABLE[f"{section}.betas"].default
    if optimizer.optimizer == "adafactor" and betas != usual:
        yield f"{section}.betas={betas} is not read by {section}.optimizer='adafactor'; leave it at {usual}"
    steps, ratio = optimizer.lr_warmup_steps, optimizer.lr_warmup_steps_ratio
    if steps >= 0 and ratio > 0:
        yield (
            f"{section}.lr_warmup_steps={steps} and {section}.lr_warmup_steps_ratio={ratio} both set the length of the"
            " warm-up; leave one at its default"
        )
    critic_rank = optimizer.lora_rank if isinstance(optimizer, Critic) else None
    rank = config.model.lora_rank if critic_rank is None else critic_rank
    if optimizer.freeze and rank:
        yield (
            f"{section}.freeze={optimizer.freeze!r}: with adapters of rank {rank} all weights of the model are frozen;"
            " leave it empty, or set the rank to 0"
        )
    if optimizer.master_dtype != "float32" and (config.model.param_dtype == "float32" or rank):
        part = f"adapters of rank {rank} are" if rank else "model.param_dtype='float32' is"
        yield (
            f"{section}.master_dtype='bfloat16': {part} float32, and steps in less would lose precision; leave it at"
            " 'float32'" + ("" if rank else ", or set model.param_dtype=bfloat16")
        )


def _example_rules(config: Common) -> Iterator[str]:
    """Yields faults of pairs, shared prompts and dropout."""
    if isinstance(config, PairTraining) and config.loss.margin and config.loss.margin_column:
        yield (
            f"loss.margin={config.loss.margin} and loss.margin_column={config.loss.margin_column!r} both set the margin"
            " of a pair; leave one at its default"
        )
    samples = config.rollout.n if isinstance(config, Loop) else 1
    if config.data.packing == "prefix" and samples < 2:
        yield (
            "data.packing='prefix' shares a prompt between its samples, and here each has one; raise rollout.n in PPO,"
            " or take buckets"
        )
    dropout = config.model.lora_dropout if isinstance(config.model, Model) else 0.0
    if dropout and config.data.packing == "prefix":
        yield (
            f"model.lora_dropout={dropout}: samples that share a prompt (data.packing='prefix') would share its"
            " dropout; take buckets"
        )
    if dropout and isinstance(config, PreferenceTuning):
        yield f"model.lora_dropout={dropout}: DPO compares pairs without dropout; set it to 0"


def _row_rules(config: Common) -> Iterator[str]:
    """Yields lengths of rows and micro-batches that hold no prompt with its response."""
    section = "actor" if isinstance(config, Loop) else "optim"
    micro, longest, row = f"{section}.max_tokens_per_device", config.data.longest_row, config.data.max_tokens_per_row
    tokens = value_of(config, micro)
    if not isinstance(config, Settings):
        alone = "is decided by jppo.train alone"
        if config.model.remat == "auto":
            yield f"model.remat='auto' {alone}; set none, dots, attention or full: the dry run says what fits"
        if tokens == -1 and section == "actor":
            yield f"{micro}=-1 {alone}; give the tokens that a device computes at a time, {longest} or more"
    if row != -1 and config.data.packing in ("buckets", "none"):
        yield f"data.max_tokens_per_row={row} is not read with data.packing={config.data.packing!r}; leave it at -1"
    if row != -1 and row < longest:
        yield _too_short("data.max_tokens_per_row", row, longest, 1)
    if tokens == -1 and section == "actor":
        return
    # Devices that share a row; if mesh.sequence is the remaining devices, their number is not known yet.
    share = longest if config.mesh.sequence == -1 else config.mesh.sequence
    if tokens * share < longest:
        yield _too_short(micro, tokens, longest, share)
    elif tokens * share < row:
        yield f"{micro}={tokens} must hold a row, data.max_tokens_per_row={row}; raise {micro}"


def _too_short(name: str, value: int, longest: int, share: int) -> str:
    """Returns the fault of a row or micro-batch that is too short for the `longest` sequence."""
    shared = f", on mesh.sequence={share} devices each" if 1 < share < longest else ""
    return (
        f"{name}={value} must hold a prompt and a response, data.max_prompt_length"
        f"+data.max_response_length={longest}{shared}; try {-(-longest // share)}"
    )
