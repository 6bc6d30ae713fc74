"""Settings of the models, the data, the algorithm and the updates."""

import dataclasses

from jppo.settings import texts
from jppo.settings.options import Options
from jppo.settings.parts import ESTIMATORS, KL_ESTIMATORS, OPTIMIZERS, POLICY_LOSSES
from jppo.settings.setting import Section, setting
from jppo.settings.texts import PRESETS

DTYPES = ("float32", "bfloat16")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")


# fmt: off

@dataclasses.dataclass(frozen=True)
class Trunk(Section):
    """Settings of all models of a run: the policy's directory, and the computation of passes."""

    path: str = setting("", "HF directory or hub name of the policy", required=True)
    init: str = setting("pretrained", "Source of the weights of model.path. random: drawn; of the directory only"
        " config.json and the tokenizer are read", choices=("pretrained", "random"))
    compute_dtype: str = setting("float32", "Dtype of matrix products; sums, log-probs and losses are float32",
        choices=(*DTYPES, "float16"))
    param_dtype: str = setting("float32", "Dtype of the parameters", choices=DTYPES)
    max_position_embeddings: int = setting(-1, "Longest row that the models may read, in place of config.json's"
        " max_position_embeddings. -1: config.json's", unit="tokens", bounds="[1,", off=-1)
    scan_layers: bool = setting(True, "One compiled layer in a scan. False compiles more slowly and runs faster on a"
        " CPU")
    remat: str = setting("none", "Activations recomputed in the backward pass. none: all are kept; dots: products and"
        " attention are kept; attention: attention is kept; full: none are kept; auto: what fits in memory",
        choices=("none", "dots", "attention", "full", "auto"))
    attention: str = setting("auto", "Attention kernel. cudnn is for GPUs, splash for TPUs; auto: what suits the"
        " devices", choices=("auto", "xla", "cudnn", "splash"))
    compiler_options: str = setting("auto", "XLA options of the passes. auto: those measured as faster on the devices;"
        " none: XLA's defaults", choices=("auto", "none"))
    lora_rank: int = setting(0, "Rank of LoRA adapters, which alone are trained. 0: no adapters, all weights are"
        " trained", bounds="[0,")
    lora_alpha: int = setting(16, "Scale of the adapters, divided by their rank", bounds="(0,")
    target_modules: str = setting("all-linear", "Modules with adapters: all-linear, or names of peft separated by"
        " commas")
    base_quantization: str = setting("none", "Form of the frozen kernels under adapters (QLoRA), which products decode"
        " layer by layer: int8, or mxfp4 with 4 bits", choices=("none", "int8", "mxfp4"), only="model.lora_rank")

    @property
    def scales_loss(self) -> bool:
        """Whether updates scale their loss, since small gradients would be 0."""
        return self.compute_dtype == "float16"


@dataclasses.dataclass(frozen=True)
class Model(Trunk):
    """The policy."""

    lora_adapter_path: str = setting("", "Folder of peft's with the initial adapters, of rank lora_rank and scale"
        " lora_alpha. '': new ones", only="model.lora_rank")
    lora_dropout: float = setting(0.0, "Probability that an update zeroes an element of an adapter's input, as in peft."
        " The critic's adapters have none", bounds="[0,1)", only="model.lora_rank")
    logprob_chunk_bytes: int = setting(-1, "Size of the logits of one chunk; log-probs are computed chunk by chunk, of"
        " the tokens that need them. -1: 64 MiB on CPUs, otherwise 512 MiB", unit="bytes", bounds="[1,", off=-1)


@dataclasses.dataclass(frozen=True)
class Files(Section):
    """The training set, and the prompts of a step."""

    train_files: str = setting("", "Training sets: parquet, jsonl, json, csv, hub:NAME/SPLIT or tfds:NAME/SPLIT@DIR,"
        " separated by commas")
    custom_cls: str = setting("", "User-defined reader of train_files and val_files, PATH.py:CLASS or MODULE:CLASS,"
        " called as Class(entry, tokenizer=)")
    train_batch_size: int = setting(256, "Prompts per step", bounds="[1,")
    shuffle: bool = setting(True, "A new order of the prompts in every epoch. False: the order of the files")


@dataclasses.dataclass(frozen=True)
class Sequences(Section):
    """Prompts with their responses: their lengths, and the rows that they are in."""

    system_prompt: str = setting("", "System message for chats that have none. '': none is added")
    max_prompt_length: int = setting(1024, "Longest prompt", unit="tokens", bounds="[1,")
    max_response_length: int = setting(512, "Longest response; a response of this length is cut", unit="tokens",
        bounds="[1,")
    packing: str = setting("auto", "Layout of rows. segments: several trajectories share a row; buckets: one per row,"
        " in a few lengths; prefix: a prompt once with its samples; none: one per row, one length; auto: segments on"
        " TPUs, else buckets, or prefix where that is estimated to save a tenth of the time",
        choices=("auto", "segments", "buckets", "prefix", "none"))
    row_lengths: int = setting(-1, "Number of row lengths for buckets and prefix; each is a shape to compile. -1: 4,"
        " or 1 in a run so small that compiling more shapes takes longer than the padding that they save",
        bounds="[1,256]", off=-1)
    max_tokens_per_row: int = setting(-1, "Longest row for segments and prefix. -1: derived from the longest prompt"
        " and response", unit="tokens", bounds="[1,", off=-1)

    @property
    def longest_row(self) -> int:
        """Returns the tokens of the longest allowed prompt and response together."""
        return self.max_prompt_length + self.max_response_length


@dataclasses.dataclass(frozen=True)
class Prompts(Sequences):
    """What is sampled from prompts, which a chat template may render."""

    prompt_role: str = setting("", "Role of a text prompt, as in user, by which the chat template renders it. '': its"
        " tokens alone")
    apply_chat_template_kwargs: str = setting("", "Arguments of the chat template, as in 'enable_thinking=False'",
        form=texts.template_arguments)


@dataclasses.dataclass(frozen=True)
class TrainingData(Sequences, Files):
    """The data settings of every training command."""


@dataclasses.dataclass(frozen=True)
class TestedData(TrainingData):
    """The data settings of commands that also test."""

    val_files: str = setting("", "Test sets, in the same forms", required=True)


@dataclasses.dataclass(frozen=True)
class Data(TestedData, Prompts):
    """Prompts, their lengths, rows."""

    prompt_key: str = setting("prompt", "Column of the prompts", required=True)
    ground_truth_key: str = setting("ground_truth", "Column of the ground truth", required=True)
    reward_fn_key: str = setting("data_source", "Column that names each row's rule", required=True)
    mix: str = setting("", "Sampling weights of files (by stem) or data sources, as in a=0.7,b=0.3. '': all prompts"
        " are equally likely")
    sampler: str = setting("", "User-defined order of the prompts, PATH.py:NAME or MODULE:NAME: a function (prompts,"
        " epoch, seed) or a class that learns from scores. '': by shuffle")
    gen_batch_size: int | None = setting(None, "Prompts per gen batch of dynamic sampling. None: train_batch_size",
        bounds="[1,", only="algorithm.filter_groups")
    val_batch_size: int = setting(-1, "Prompts generated concurrently in a test. -1: all", bounds="[1,", off=-1)
    train_max_samples: int = setting(-1, "Training prompts, the first of the set. -1: all", bounds="[1,", off=-1)
    val_max_samples: int = setting(-1, "Prompts of a test, the first of the set. -1: all", bounds="[1,", off=-1)
    filter_overlong_prompts: bool = setting(True, "Removal of over-long prompts from the set")
    truncation: str = setting("error", "Treatment of over-long prompts that are not removed: an error, or the side"
        " that is cut", choices=("error", "left", "right", "middle"))


@dataclasses.dataclass(frozen=True)
class Demonstrations(TrainingData):
    """The data of fine-tuning."""

    prompt_key: str = setting("prompt", "Column of the prompts, or COLUMN.ENTRY of a dict", required=True)
    prompt_role: str = setting("", "Role of a text prompt, as in user, by which the chat template renders it. '': its"
        " tokens alone")
    response_key: str = setting("response", "Column of the responses, or COLUMN.ENTRY of a dict", required=True)
    messages_key: str = setting("messages", "Column of chats, or COLUMN.ENTRY of a dict", required=True)
    learn_turns: str = setting("last", "Assistant turns of `messages` that are learned", choices=("last", "all"))


@dataclasses.dataclass(frozen=True)
class Algorithm(Section):
    """Advantages, the KL in the reward, old log-probs."""

    adv_estimator: str = setting("gae", "Advantage estimator. gae has a critic; those that compare the samples of a"
        " prompt need rollout.n above 1; distill reads no score, only the KL to the teacher ref.path",
        choices=ESTIMATORS)
    extension: str = setting("", "User-defined algorithm, PATH.py:NAME or MODULE:NAME: a function that returns an"
        " Algorithm. Its keyword arguments are algorithm.options.NAME; what it leaves out is adv_estimator's. '': none")
    options: Options = dataclasses.field(default_factory=Options)  # of the extension, by its signature
    gamma: float = setting(1.0, "Discount factor of gae, reinforce_plus_plus and distill", bounds="[0, 1]")
    gamma_by: str = setting("token", "Steps that gamma discounts. token: from token to token; turn: from turn to turn"
        " of a conversation, and not within a turn", choices=("token", "turn"))
    lam: float = setting(1.0, "λ of gae", bounds="[0, 1]")
    lam_alpha: float | None = setting(None, "α of the length-adaptive λ of gae, 1 - 1/(α l) for a response of l"
        " tokens; replaces lam. None: lam", bounds="(0,")
    norm_adv_by_std_in_grpo: bool = setting(True, "Division by the group's standard deviation in grpo, grpo_passk and"
        " gdpo")
    gdpo_reward_keys: str = setting("", "Parts of the reward that gdpo normalizes apart, separated by commas, as in"
        " rule_score,format_score", only="algorithm.adv_estimator=gdpo")
    gdpo_reward_weights: str = setting("", "Weights of gdpo_reward_keys, separated by commas. '': 1 for each",
        only="algorithm.adv_estimator=gdpo")
    use_kl_in_reward: bool = setting(False, "KL penalty to the reference in the token rewards")
    kl_penalty: str = setting("kl", "KL estimator of the reward penalty", choices=KL_ESTIMATORS)
    kl_coef: float = setting(0.001, "Coefficient of the reward penalty", bounds="[0,")
    kl_ctrl_type: str = setting("fixed", "Schedule of kl_coef. adaptive: kl_coef is the initial value and follows the"
        " KL", choices=("fixed", "adaptive"))
    target_kl: float = setting(0.1, "Target KL of the adaptive schedule", unit="nats", bounds="(0,")
    horizon: int = setting(10000, "Horizon of the adaptive schedule; larger is slower", unit="responses", bounds="[1,")
    filter_groups: bool = setting(False, "Dynamic sampling: prompts whose samples are all equal in"
        " filter_groups_metric are replaced by new prompts")
    filter_groups_metric: str = setting("score", "Metric that must differ: score, or a part of the reward, such as"
        " rule_score", required=True, only="algorithm.filter_groups")
    max_num_gen_batches: int = setting(10, "Gen batches of a step; after the last, the step has fewer prompts. 0: no"
        " bound", bounds="[0,", only="algorithm.filter_groups")
    filter_truncated: bool = setting(False, "Over-long filtering: truncated responses are not learned; their scores"
        " still count in their groups")
    old_logprob: str = setting("decoupled", "Old log-probs of the loss. decoupled: recomputed by the trainer; bypass:"
        " the rollout engine's; correction: recomputed, with the log-prob mismatch corrected",
        choices=("decoupled", "bypass", "correction"))
    rollout_correction: str = setting("", "Preset of verl's: values of old_logprob, rollout_is, rollout_rs, their"
        " thresholds, and actor.loss_mode. '': none", choices=("", *PRESETS))
    rollout_is: str = setting("none", "Importance weights of the correction, per token or per sequence. With bypass and"
        " actor.loss_mode=gpg they are of the current policy", choices=("none", "token", "sequence"))
    rollout_is_threshold: str = setting("2.0", "Upper bound of the importance weights, or a band LOW_HIGH",
        form=texts.importance_band)
    rollout_is_batch_normalize: bool = setting(False, "Division of the importance weights by their mean over the batch")
    rollout_rs: str = setting("", "Rejection rules of the correction, separated by commas, as in token_k1,seq_mean_k3."
        " With bypass they judge the current policy")
    rollout_rs_threshold: str = setting("", "Thresholds of the rejection rules: one for all, or one for each")


@dataclasses.dataclass(frozen=True)
class Optimizer(Section):
    """An optimizer and its schedule."""

    lr: float = setting(1e-06, "Learning rate", bounds="[0,")
    optimizer: str = setting("adamw", "Optimizer, an optax chain", choices=OPTIMIZERS)
    grad_clip: float = setting(1.0, "Largest global gradient norm; longer gradients are scaled down to it",
        bounds="(0,")
    betas: tuple[float, float] = setting((0.9, 0.999), "Decay rates of Adam's two moments; lion reads both, sgd the"
        " first as its momentum", bounds="[0, 1)")
    weight_decay: float = setting(0.01, "Decoupled weight decay, multiplied by the learning rate", bounds="[0,")
    lr_scheduler_type: str = setting("constant", "Schedule of the learning rate after the warm-up",
        choices=("constant", "cosine", "linear"))
    lr_warmup_steps: int = setting(-1, "Warm-up of the learning rate. -1: by lr_warmup_steps_ratio",
        unit="steps", bounds="[0,", off=-1)
    lr_warmup_steps_ratio: float = setting(0.0, "Warm-up as a fraction of all steps", bounds="[0, 1]")
    init_lr_ratio: float = setting(0.0, "Learning rate at the start of the warm-up, as a fraction of the peak",
        bounds="[0, 1]")
    min_lr_ratio: float = setting(0.0, "Final learning rate of cosine and linear, as a fraction of the peak",
        bounds="[0, 1]")
    master_dtype: str = setting("float32", "Dtype of the weights that the optimizer steps; float32 with bfloat16"
        " parameters keeps a copy", choices=DTYPES)
    moments_dtype: str = setting("float32", "Dtype of the optimizer's moments; bfloat16 is rounded stochastically",
        choices=DTYPES)
    freeze: str = setting("", "Parameters that keep their initial values: patterns of their Hugging Face names,"
        " separated by commas, as in *.self_attn.*. '': all are learned")
    optimizer_offload: bool = setting(False, "Optimizer state in host memory between its steps")


@dataclasses.dataclass(frozen=True)
class Actor(Optimizer):
    """The policy's loss and optimizer."""

    ppo_mini_batch_size: int = setting(64, "Responses per optimizer step", bounds="[1,")
    ppo_epochs: int = setting(1, "Epochs over the batch of a step", bounds="[1,")
    shuffle: bool = setting(False, "New mini-batches in every epoch")
    loss_mode: str = setting("vanilla", "Policy loss; vanilla is PPO's clipped loss", choices=POLICY_LOSSES)
    loss_agg_mode: str = setting("token-mean", "Average of the token losses", choices=AGGREGATIONS)
    loss_scale_factor: float | None = setting(None, "Divisor of seq-mean-token-sum-norm. None:"
        " data.max_response_length", bounds="(0,")
    clip_ratio: float = setting(0.2, "Clip range of the probability ratio around 1", bounds="[0,")
    clip_ratio_low: float | None = setting(None, "Clip range below 1. None: clip_ratio", bounds="[0,")
    clip_ratio_high: float | None = setting(None, "Clip range above 1. None: clip_ratio", bounds="[0,")
    clip_ratio_c: float = setting(3.0, "Dual clip: largest ratio that counts where the advantage is negative",
        bounds="(1,")
    tau_pos: float = setting(1.0, "Temperature of sapo where the advantage is positive", bounds="(0,")
    tau_neg: float = setting(1.05, "Temperature of sapo where the advantage is negative", bounds="(0,")
    dro_beta: float | None = setting(None, "Coefficient of dro's quadratic penalty; dro needs one", bounds="(0,",
        only="actor.loss_mode=dro")
    clip_cov_ratio: float = setting(0.0002, "Largest fraction of a mini-batch's tokens that clip_cov leaves out",
        bounds="(0, 1]", only="actor.loss_mode=clip_cov")
    clip_cov_lb: float = setting(1.0, "Covariance above which clip_cov may leave a token out",
        only="actor.loss_mode=clip_cov")
    clip_cov_ub: float = setting(5.0, "Covariance below which clip_cov may leave a token out",
        only="actor.loss_mode=clip_cov")
    kl_cov_ratio: float = setting(0.0002, "Fraction of a mini-batch's tokens that kl_cov penalizes: the highest"
        " covariances", bounds="(0, 1]", only="actor.loss_mode=kl_cov")
    ppo_kl_coef: float = setting(0.1, "Coefficient of kl_cov's penalty", bounds="[0,", only="actor.loss_mode=kl_cov")
    entropy_coeff: float = setting(0.0, "Coefficient of the entropy bonus in the loss")
    calculate_entropy: bool = setting(True, "Entropy as a metric. False saves a pass over the vocabulary for the old"
        " log-probs")
    use_kl_loss: bool = setting(False, "KL to the reference as a term of the loss")
    kl_loss_coef: float = setting(0.001, "Coefficient of the KL term", bounds="[0,")
    kl_loss_type: str = setting("low_var_kl", "KL estimator of the loss", choices=KL_ESTIMATORS)
    kl_loss_max_clamp: float | None = setting(None, "Largest absolute value of a token's KL in the loss. None: no"
        " bound", bounds="(0,", only="actor.use_kl_loss")
    kl_topk: int = setting(32, "Tokens of forward_kl_topk, the reference's likeliest", bounds="[1,",
        only="actor.kl_loss_type=forward_kl_topk")
    kl_log_prob_min_clamp: float | None = setting(None, "Smallest log-prob of both models in forward_kl_topk. None: no"
        " bound", only="actor.kl_loss_type=forward_kl_topk")
    positive_lm_coef: float = setting(0.0, "Coefficient of the negative log-likelihood of responses with a score above"
        " 0", bounds="[0,")
    router_aux_loss_coef: float = setting(0.0, "Coefficient of the load-balancing loss of a mixture of experts. Above"
        " 0 an update takes one more forward pass, which counts each mini-batch's tokens by expert", bounds="[0,")
    router_z_loss_coef: float = setting(0.0, "Coefficient of the z-loss of a mixture's routers, the mean squared"
        " log-partition", bounds="[0,")
    max_tokens_per_device: int = setting(16384, "Size of a micro-batch: affects memory, not results. -1: what fits"
        " (PPO only)", unit="tokens", bounds="[1,", off=-1)
    param_offload: bool = setting(False, "Parameters in host memory while they are not used")


@dataclasses.dataclass(frozen=True)
class Critic(Optimizer):
    """The critic, which `gae` alone has."""

    path: str = setting("", "Initial model of the critic. '': the policy's")
    lora_rank: int | None = setting(None, "Rank of the critic's adapters. None: the policy's", bounds="[0,")
    lora_alpha: int | None = setting(None, "Scale of the critic's adapters. None: the policy's", bounds="(0,")
    lr: float = setting(1e-05, "Learning rate", bounds="[0,")
    ppo_mini_batch_size: int | None = setting(None, "Responses per optimizer step. None: the actor's", bounds="[1,")
    ppo_epochs: int | None = setting(None, "Epochs over the batch of a step. None: the actor's", bounds="[1,")
    warmup_epochs: int | None = setting(None, "Epochs over the batch of a step in which only the critic learns. None:"
        " ppo_epochs", bounds="[1,", only="trainer.critic_warmup")
    shuffle: bool = setting(False, "New mini-batches in every epoch")
    loss_agg_mode: str | None = setting(None, "Average of the token losses. None: the actor's", choices=AGGREGATIONS)
    loss_scale_factor: float | None = setting(None, "Divisor of seq-mean-token-sum-norm. None: the actor's",
        bounds="(0,")
    lam: float | None = setting(None, "λ of the returns that the critic learns. None: the λ of the advantages",
        bounds="[0, 1]")
    value_norm_decay: float | None = setting(None, "Decay per step of the running mean and standard deviation of"
        " returns, which normalize values. None: no normalization", bounds="[0, 1)")
    value_bins: int = setting(0, "Bins of a value head that is a histogram and learns by cross-entropy (HL-Gauss); such"
        " a head is always new. 0: a scalar head", bounds="[2,", off=0)
    value_head_std: float = setting(0.0, "Standard deviation of a new value head's weights. 0.0: zeros, so that all"
        " values start at 0, or with value_bins in the middle of value_range", bounds="[0,")
    value_range: tuple[float, float] = setting((-5.0, 5.0), "Lowest and highest value of the bins; of normalized"
        " values in their own unit", only="critic.value_bins")
    cliprange_value: float = setting(0.5, "Clip range of a value around the old value; of normalized values in their"
        " own unit", bounds="[0,", only="critic.value_bins=0")
    param_offload: bool = setting(False, "Parameters in host memory while they are not used")


@dataclasses.dataclass(frozen=True)
class Ref(Section):
    """The frozen reference of a KL."""

    path: str = setting("policy", "Reference model or teacher: an HF directory; policy: the initial policy; '': no"
        " reference")
    url: str = setting("", "Address of a vLLM server that has the reference, in place of path; for a KL of sampled"
        " tokens. SOURCE=ADDRESS,...: one for each data source. '': it is on the mesh")
    param_offload: bool = setting(False, "Parameters in host memory while they are not used")


@dataclasses.dataclass(frozen=True)
class Mesh(Section):
    """How devices share the work."""

    data: int = setting(-1, "Devices over which rows are sharded. -1, here or below: the remaining devices",
        bounds="[1,", off=-1)
    fsdp: int = setting(1, "Devices over which rows and the parameters' widths are sharded", bounds="[1,", off=-1)
    tensor: int = setting(1, "Devices over which heads, MLP and vocabulary are sharded", bounds="[1,", off=-1)
    sequence: int = setting(1, "Devices over which the positions of a row are sharded", bounds="[1,", off=-1)
    expert: int = setting(1, "Devices over which experts are sharded; tokens are sent to them by all-to-all. Rows and"
        " other parameters' widths are sharded over it as over fsdp", bounds="[1,", off=-1)


@dataclasses.dataclass(frozen=True)
class Optim(Optimizer):
    """The optimizer of fine-tuning, reward models and DPO."""

    max_tokens_per_device: int = setting(16384, "Size of a micro-batch: affects memory, not results. -1: what fits"
        " (PPO only)", unit="tokens", bounds="[1,", off=-1)


@dataclasses.dataclass(frozen=True)
class Loss(Section):
    """The pair loss of a reward model."""

    margin: float = setting(0.0, "Margin by which the chosen response should score higher", bounds="[0,")
    margin_column: str = setting("", "Column with a margin for each pair. '': loss.margin for all")
    center_rewards_coefficient: float = setting(0.0, "Coefficient of (r_chosen + r_rejected)^2, which centers scores"
        " at 0", bounds="[0,")


@dataclasses.dataclass(frozen=True)
class Dpo(Section):
    """The pair loss of DPO."""

    loss_type: str = setting("sigmoid", "Pair loss. sigmoid: DPO's; ipo: IPO's, of log-probs per token",
        choices=("sigmoid", "ipo"))
    beta: float = setting(0.1, "Strength of the pull to the reference: β of DPO, τ of IPO", bounds="(0,")
    reference: str = setting("cached", "Log-probs by the initial policy. cached: of all pairs, at each start; mesh: of"
        " each batch, by a second copy of what is trained", choices=("cached", "mesh"))
