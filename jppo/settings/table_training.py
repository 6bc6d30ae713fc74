"""Settings of the models, the data, the algorithm and the updates."""

from jppo.settings import texts
from jppo.settings.parts import ESTIMATORS, KL_ESTIMATORS, OPTIMIZERS, POLICY_LOSSES
from jppo.settings.setting import Setting as S

DTYPES = ("float32", "bfloat16")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")

MODEL = (
    S("path", "", "HF directory or hub name of the policy", required=True),
    S("init", "pretrained", "Source of the weights of model.path. random: drawn; of the directory only config.json and"
      " the tokenizer are read", choices=("pretrained", "random")),
    S("compute_dtype", "float32", "Dtype of matrix products; sums, log-probs and losses are float32", choices=DTYPES),
    S("param_dtype", "float32", "Dtype of the parameters", choices=DTYPES),
    S("scan_layers", True, "One compiled layer in a scan. False compiles more slowly and runs faster on a CPU"),
    S("remat", "none", "Activations recomputed in the backward pass. none: all are kept; dots: products and attention"
      " are kept; attention: attention is kept; full: none are kept; auto: what fits in memory",
      choices=("none", "dots", "attention", "full", "auto")),
    S("attention", "auto", "Attention kernel. cudnn and pallas are for GPUs, splash for TPUs; auto: what suits the"
      " devices", choices=("auto", "xla", "cudnn", "pallas", "splash")),
    S("compiler_options", "auto", "XLA options of the passes. auto: those measured as faster on the devices; none:"
      " XLA's defaults", choices=("auto", "none")),
    S("logprob_chunk_bytes", 2**29, "Size of the logits of one chunk; log-probs are computed chunk by chunk",
      unit="bytes", bounds="[1,"),
    S("lora_rank", 0, "Rank of LoRA adapters, which alone are trained. 0: no adapters, all weights are trained",
      bounds="[0,"),
    S("lora_alpha", 16, "Scale of the adapters, divided by their rank", bounds="(0,"),
    S("target_modules", "all-linear", "Modules with adapters: all-linear, or names of peft separated by commas"),
)  # fmt: skip

DATA = (
    S("train_files", "", "Training sets: parquet, jsonl, json or tfds:NAME/SPLIT@DIR, separated by commas"),
    S("val_files", "", "Test sets, in the same forms", required=True),
    S("prompt_key", "prompt", "Column of the prompts", required=True),
    S("reward_fn_key", "data_source", "Column that names each row's rule", required=True),
    S("custom_cls", "", "User-defined reader of train_files and val_files, PATH.py:CLASS or MODULE:CLASS, called as"
      " Class(entry, tokenizer=)"),
    S("mix", "", "Sampling weights of files (by stem) or data sources, as in a=0.7,b=0.3. '': all prompts are equally"
      " likely"),
    S("sampler", "", "User-defined order of the prompts, PATH.py:NAME or MODULE:NAME: a function (prompts, epoch, seed)"
      " or a class that learns from scores. '': by shuffle"),
    S("train_batch_size", 256, "Prompts per step", bounds="[1,"),
    S("gen_batch_size", None, "Prompts per gen batch of dynamic sampling. None: train_batch_size", kind=int,
      bounds="[1,", only="algorithm.filter_groups"),
    S("val_batch_size", -1, "Prompts generated concurrently in a test. -1: all", bounds="[1,", off=-1),
    S("train_max_samples", -1, "Training prompts, the first of the set. -1: all", bounds="[1,", off=-1),
    S("val_max_samples", -1, "Prompts of a test, the first of the set. -1: all", bounds="[1,", off=-1),
    S("system_prompt", "", "System message for chats that have none. '': none is added"),
    S("apply_chat_template_kwargs", "", "Arguments of the chat template, as in 'enable_thinking=False'",
      form=texts.template_arguments),
    S("max_prompt_length", 1024, "Longest prompt", unit="tokens", bounds="[1,"),
    S("max_response_length", 512, "Longest response; a response of this length is cut", unit="tokens", bounds="[1,"),
    S("filter_overlong_prompts", True, "Removal of over-long prompts from the set"),
    S("truncation", "error", "Treatment of over-long prompts that are not removed: an error, or the side that is cut",
      choices=("error", "left", "right", "middle")),
    S("shuffle", True, "A new order of the prompts in every epoch. False: the order of the files"),
    S("packing", "auto", "Layout of rows. segments: several trajectories share a row; buckets: one per row, in a few"
      " lengths; prefix: a prompt once with its samples; none: one per row, one length; auto: segments on TPUs,"
      " else buckets", choices=("auto", "segments", "buckets", "prefix", "none")),
    S("row_lengths", 4, "Number of row lengths for buckets and prefix; each is a shape to compile", bounds="[1,256]"),
    S("max_tokens_per_row", -1, "Longest row for segments and prefix. -1: derived from the longest prompt and"
      " response", unit="tokens", bounds="[1,", off=-1),
)  # fmt: skip

ALGORITHM = (
    S("adv_estimator", "gae", "Advantage estimator. gae has a critic; those that compare the samples of a prompt need"
      " rollout.n above 1; distill reads no score, only the KL to the teacher ref.path", choices=ESTIMATORS),
    S("gamma", 1.0, "Discount factor of gae, reinforce_plus_plus and distill", bounds="[0, 1]"),
    S("gamma_by", "token", "Steps that gamma discounts. token: from token to token; turn: from turn to turn of a"
      " conversation, and not within a turn", choices=("token", "turn")),
    S("lam", 1.0, "λ of gae", bounds="[0, 1]"),
    S("lam_alpha", None, "α of the length-adaptive λ of gae, 1 - 1/(α l) for a response of l tokens; replaces lam."
      " None: lam", kind=float, bounds="(0,"),
    S("norm_adv_by_std_in_grpo", True, "Division by the group's standard deviation in grpo and grpo_passk"),
    S("use_kl_in_reward", False, "KL penalty to the reference in the token rewards"),
    S("kl_penalty", "kl", "KL estimator of the reward penalty", choices=KL_ESTIMATORS),
    S("kl_coef", 0.001, "Coefficient of the reward penalty", bounds="[0,"),
    S("kl_ctrl_type", "fixed", "Schedule of kl_coef. adaptive: kl_coef is the initial value and follows the KL",
      choices=("fixed", "adaptive")),
    S("target_kl", 0.1, "Target KL of the adaptive schedule", unit="nats", bounds="(0,"),
    S("horizon", 10000, "Horizon of the adaptive schedule; larger is slower", unit="responses", bounds="[1,"),
    S("filter_groups", False, "Dynamic sampling: prompts whose samples are all equal in filter_groups_metric are"
      " replaced by new prompts"),
    S("filter_groups_metric", "score", "Metric that must differ: score, or a part of the reward, such as rule_score",
      required=True, only="algorithm.filter_groups"),
    S("max_num_gen_batches", 10, "Gen batches of a step; after the last, the step has fewer prompts. 0: no bound",
      bounds="[0,", only="algorithm.filter_groups"),
    S("filter_truncated", False, "Over-long filtering: truncated responses are not learned; their scores still count in"
      " their groups"),
    S("old_logprob", "decoupled", "Old log-probs of the loss. decoupled: recomputed by the trainer; bypass: the"
      " rollout engine's; correction: recomputed, with the log-prob mismatch corrected",
      choices=("decoupled", "bypass", "correction")),
    S("rollout_is", "none", "Importance weights of the correction, per token or per sequence",
      choices=("none", "token", "sequence")),
    S("rollout_is_threshold", "2.0", "Upper bound of the importance weights, or a band LOW_HIGH",
      form=texts.importance_band),
    S("rollout_is_batch_normalize", False, "Division of the importance weights by their mean over the batch"),
    S("rollout_rs", "", "Rejection rules of the correction, separated by commas, as in token_k1,seq_mean_k3"),
    S("rollout_rs_threshold", "", "Thresholds of the rejection rules: one for all, or one for each"),
)  # fmt: skip

MINI_BATCH = "Responses per optimizer step"
EPOCHS = S("ppo_epochs", 1, "Epochs over the batch of a step", bounds="[1,")
SHUFFLE = S("shuffle", False, "New mini-batches in every epoch")
OFFLOAD = S("param_offload", False, "Parameters in host memory while they are not used")
OPTIMIZER = (
    S("optimizer", "adamw", "Optimizer, an optax chain", choices=OPTIMIZERS),
    S("grad_clip", 1.0, "Largest global gradient norm; longer gradients are scaled down to it", bounds="(0,"),
    S("betas", (0.9, 0.999), "Decay rates of Adam's two moments; lion reads both, sgd the first as its momentum",
      bounds="[0, 1)"),
    S("weight_decay", 0.01, "Decoupled weight decay, multiplied by the learning rate", bounds="[0,"),
    S("lr_scheduler_type", "constant", "Schedule of the learning rate after the warm-up",
      choices=("constant", "cosine")),
    S("lr_warmup_steps", -1, "Warm-up of the learning rate from 0. -1: by lr_warmup_steps_ratio", unit="steps",
      bounds="[0,", off=-1),
    S("lr_warmup_steps_ratio", 0.0, "Warm-up as a fraction of all steps", bounds="[0, 1]"),
    S("min_lr_ratio", 0.0, "Final learning rate of cosine as a fraction of the peak", bounds="[0, 1]"),
    S("master_dtype", "float32", "Dtype of the weights that the optimizer steps; float32 with bfloat16 parameters"
      " keeps a copy", choices=DTYPES),
    S("moments_dtype", "float32", "Dtype of the optimizer's moments; bfloat16 is rounded stochastically",
      choices=DTYPES),
    S("optimizer_offload", False, "Optimizer state in host memory between its steps"),
)  # fmt: skip
LR = S("lr", 1e-6, "Learning rate", bounds="[0,")
MAX_TOKENS = S("max_tokens_per_device", 16384, "Size of a micro-batch: affects memory, not results. -1: what fits"
               " (PPO only)", unit="tokens", bounds="[1,", off=-1)  # fmt: skip

ACTOR = (
    LR,
    S("ppo_mini_batch_size", 64, MINI_BATCH, bounds="[1,"),
    EPOCHS,
    SHUFFLE,
    S("loss_mode", "vanilla", "Policy loss; vanilla is PPO's clipped loss", choices=POLICY_LOSSES),
    S("loss_agg_mode", "token-mean", "Average of the token losses", choices=AGGREGATIONS),
    S("loss_scale_factor", None, "Divisor of seq-mean-token-sum-norm. None: data.max_response_length", kind=float,
      bounds="(0,"),
    S("clip_ratio", 0.2, "Clip range of the probability ratio around 1", bounds="[0,"),
    S("clip_ratio_low", None, "Clip range below 1. None: clip_ratio", kind=float, bounds="[0,"),
    S("clip_ratio_high", None, "Clip range above 1. None: clip_ratio", kind=float, bounds="[0,"),
    S("clip_ratio_c", 3.0, "Dual clip: largest ratio that counts where the advantage is negative", bounds="(1,"),
    S("tau_pos", 1.0, "Temperature of sapo where the advantage is positive", bounds="(0,"),
    S("tau_neg", 1.05, "Temperature of sapo where the advantage is negative", bounds="(0,"),
    S("entropy_coeff", 0.0, "Coefficient of the entropy bonus in the loss"),
    S("calculate_entropy", True, "Entropy as a metric. False saves a pass over the vocabulary for the old log-probs"),
    S("use_kl_loss", False, "KL to the reference as a term of the loss"),
    S("kl_loss_coef", 0.001, "Coefficient of the KL term", bounds="[0,"),
    S("kl_loss_type", "low_var_kl", "KL estimator of the loss", choices=KL_ESTIMATORS),
    S("positive_lm_coef", 0.0, "Coefficient of the negative log-likelihood of responses with a score above 0",
      bounds="[0,"),
    S("router_aux_loss_coef", 0.0, "Coefficient of the load-balancing loss of a mixture of experts. Above 0 an update"
      " takes one more forward pass, which counts each mini-batch's tokens by expert", bounds="[0,"),
    S("router_z_loss_coef", 0.0, "Coefficient of the z-loss of a mixture's routers, the mean squared log-partition",
      bounds="[0,"),
    MAX_TOKENS,
    OFFLOAD,
    *OPTIMIZER,
)  # fmt: skip

CRITIC = (
    S("path", "", "Initial model of the critic. '': the policy's"),
    S("lora_rank", None, "Rank of the critic's adapters. None: the policy's", kind=int, bounds="[0,"),
    S("lora_alpha", None, "Scale of the critic's adapters. None: the policy's", kind=int, bounds="(0,"),
    S("lr", 1e-5, "Learning rate", bounds="[0,"),
    S("ppo_mini_batch_size", None, f"{MINI_BATCH}. None: the actor's", kind=int, bounds="[1,"),
    S("ppo_epochs", None, f"{EPOCHS.meaning}. None: the actor's", kind=int, bounds="[1,"),
    S("warmup_epochs", None, "Epochs over the batch of a step in which only the critic learns. None: ppo_epochs",
      kind=int, bounds="[1,", only="trainer.critic_warmup"),
    SHUFFLE,
    S("loss_agg_mode", None, "Average of the token losses. None: the actor's", kind=str, choices=AGGREGATIONS),
    S("loss_scale_factor", None, "Divisor of seq-mean-token-sum-norm. None: the actor's", kind=float, bounds="(0,"),
    S("lam", None, "λ of the returns that the critic learns. None: the λ of the advantages", kind=float,
      bounds="[0, 1]"),
    S("value_norm_decay", None, "Decay per step of the running mean and standard deviation of returns, which normalize"
      " values. None: no normalization", kind=float, bounds="[0, 1)"),
    S("value_bins", 0, "Bins of a value head that is a histogram and learns by cross-entropy (HL-Gauss); such a head"
      " is always new. 0: a scalar head", bounds="[2,", off=0),
    S("value_range", (-5.0, 5.0), "Lowest and highest value of the bins; of normalized values in their own unit",
      only="critic.value_bins"),
    S("value_head_std", 0.0, "Standard deviation of a new value head's weights. 0.0: zeros, so that all values start at"
      " 0, or with value_bins in the middle of value_range", bounds="[0,"),
    S("cliprange_value", 0.5, "Clip range of a value around the old value; of normalized values in their own unit",
      bounds="[0,", only="critic.value_bins=0"),
    OFFLOAD,
    *OPTIMIZER,
)  # fmt: skip

REF = (
    S("path", "policy", "Reference model or teacher: an HF directory; policy: the initial policy; '': no reference"),
    S("url", "", "Address of a vLLM server that has the reference, in place of path; for a KL of sampled tokens. '': it"
      " is on the mesh"),
    OFFLOAD,
)  # fmt: skip

MESH = (
    S("data", -1, "Devices over which rows are sharded. -1, here or below: the remaining devices",
      bounds="[1,", off=-1),
    S("fsdp", 1, "Devices over which rows and the parameters' widths are sharded", bounds="[1,",
      off=-1),
    S("tensor", 1, "Devices over which heads, MLP and vocabulary are sharded", bounds="[1,", off=-1),
    S("sequence", 1, "Devices over which the positions of a row are sharded", bounds="[1,", off=-1),
    S("expert", 1, "Devices over which experts are sharded; tokens are sent to them by all-to-all. Rows and other"
      " parameters' widths are sharded over it as over fsdp", bounds="[1,", off=-1),
)  # fmt: skip

OPTIM = (LR, *OPTIMIZER, MAX_TOKENS)  # of fine-tuning and reward models, in place of actor and critic
LEARN_TURNS = S("learn_turns", "last", "Assistant turns of `messages` that are learned", choices=("last", "all"))
LOSS = (
    S("margin", 0.0, "Margin by which the chosen response should score higher", bounds="[0,"),
    S("margin_column", "", "Column with a margin for each pair. '': loss.margin for all"),
    S("center_rewards_coefficient", 0.0, "Coefficient of (r_chosen + r_rejected)^2, which centers scores at 0",
      bounds="[0,"),
)  # fmt: skip
