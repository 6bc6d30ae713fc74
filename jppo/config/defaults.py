"""Every setting with its default and, behind it, what it means: the one place of both.

A file in `configs/` starts from here; --help and docs/configuration.md show the comments (`meanings.py`).
"""

import ml_collections
from ml_collections import config_dict

OPTIM = (
    "grad_clip",
    "betas",
    "weight_decay",
    "lr_scheduler_type",
    "lr_warmup_steps",
    "lr_warmup_steps_ratio",
    "min_lr_ratio",
    "master_dtype",
    "moments_dtype",
    "optimizer_offload",
)
SHAPE_SETTINGS = (
    "max_prompt_length",
    "max_response_length",
    "packing",
    "row_lengths",
    "max_tokens_per_row",
)


def default() -> ml_collections.ConfigDict:
    """All settings of PPO training with their defaults; verl's names where they mean what verl's mean."""
    c, none = ml_collections.ConfigDict, config_dict.placeholder
    optim = dict(
        grad_clip=1.0,  # largest norm of a gradient; a longer one is scaled down to it
        betas=(0.9, 0.999),  # of Adam's means of the gradient and of its square
        weight_decay=0.01,  # AdamW's: in a step each weight shrinks by this times the learning rate
        lr_scheduler_type="constant",  # of the learning rate, after its warm-up
        lr_warmup_steps=-1,  # steps in which the learning rate rises from 0; -1: by the ratio
        lr_warmup_steps_ratio=0.0,  # the same as a share of all steps
        min_lr_ratio=0.0,  # of cosine: the last learning rate as a share of the first
        master_dtype="float32",  # of what is stepped; float32 beside parameters of bfloat16 is a copy of them
        moments_dtype="float32",  # of Adam's two means
        optimizer_offload=False,  # the optimizer is on the host but for its steps
    )
    config = c()
    config.model = c(
        dict(
            path="",  # an HF directory, or a hub name
            init="pretrained",  # random: only config.json and the tokenizer are read, weights are drawn
            compute_dtype="float32",  # of products with parameters; their sums, log-probs and losses are float32
            param_dtype="float32",  # of the parameters
            scan_layers=True,  # False compiles slower and runs faster on CPU
            remat="none",  # kept for the backward pass: all; products, attention; attention; nothing; auto: what fits
            attention="auto",  # the kernel; auto: the one that fits the devices; cudnn, pallas: GPUs; splash: TPUs
            compiler_options="auto",  # of the passes' programs; auto: those known to pay on the devices; none: XLA's
            logprob_chunk_bytes=2**29,  # log-probs are computed chunk by chunk: of the logits of one
            lora_rank=0,  # of adapters, which alone are trained; 0: there are none, all weights are
            lora_alpha=16,  # adapters are scaled by this over their rank
            target_modules="all-linear",  # what has adapters: all, or some by peft's names, separated by commas
        )
    )
    config.data = c(
        dict(
            train_files="",  # parquet, jsonl, json or tfds:NAME/SPLIT@DIR; several separated by commas
            val_files="",  # the test's, in the same forms
            custom_cls="",  # 'path.py:Class': reads the entries of train_files and val_files, Class(entry, tokenizer=)
            prompt_key="prompt",  # column of the prompts
            reward_fn_key="data_source",  # column that names each row's rule
            mix="",  # 'a=0.7,b=0.3': weights of files, by stem, or of data sources; '': all prompts alike
            train_batch_size=256,  # prompts a step
            val_batch_size=-1,  # prompts asked at once in a test; -1: all
            train_max_samples=-1,  # prompts of training, the first so many; -1: all
            val_max_samples=-1,  # prompts of a test, the first so many; -1: all
            system_prompt="",  # put before chat messages that have no system message; '': none
            apply_chat_template_kwargs="",  # arguments of the chat template, as in 'enable_thinking=False'; '': none
            max_prompt_length=1024,  # tokens
            max_response_length=512,  # tokens; one that gets there is cut
            filter_overlong_prompts=True,  # leaves over-long prompts out
            truncation="error",  # of over-long prompts that are not left out: an error, or which part is cut away
            shuffle=True,  # draws prompts in another order in every epoch; False: as the files have them
            packing="auto",  # how rows are filled: auto is segments on a TPU, else buckets; prefix: a prompt once
            row_lengths=4,  # buckets, prefix: how many lengths of row, each one more shape to compile
            max_tokens_per_row=-1,  # segments, prefix: the longest row; -1: of the longest prompt and response, or more
        )
    )
    config.algorithm = c(
        dict(
            adv_estimator="gae",  # gae has a critic; what compares the responses to a prompt needs rollout.n above 1
            gamma=1.0,  # discount; read by gae and reinforce_plus_plus
            lam=1.0,  # gae's λ
            norm_adv_by_std_in_grpo=True,  # divides by the group's deviation; read by grpo and grpo_passk
            use_kl_in_reward=False,  # takes the KL to the reference off the rewards of the tokens
            kl_penalty="kl",  # the estimator of that KL; full holds weakly in a reward
            kl_coef=0.001,  # its coefficient
            kl_ctrl_type="fixed",  # adaptive: kl_coef is the first one, then it follows the KL
            target_kl=0.1,  # adaptive: the KL that is aimed at
            horizon=10000,  # adaptive: responses over which the coefficient follows; the larger the slower
            old_logprob="decoupled",  # decoupled: recomputed; bypass: the sampler's; correction: recomputed, gap mended
            rollout_is="none",  # correction: importance weights by token or by sequence
            rollout_is_threshold="2.0",  # an upper bound, or a band low_high
            rollout_is_batch_normalize=False,  # correction: divides the weights by their mean over the batch
            rollout_rs="",  # correction: rules of rejection, separated by commas, as in token_k1,seq_mean_k3
            rollout_rs_threshold="",  # one for all rules, or one for each
        )
    )
    config.actor = c(
        dict(
            lr=1e-6,  # learning rate
            ppo_mini_batch_size=64,  # responses of one optimizer step
            ppo_epochs=1,  # passes over a step's batch
            shuffle=False,  # draws the mini-batches anew in every epoch
            loss_mode="vanilla",  # vanilla is PPO; see docs/algorithms.md
            loss_agg_mode="token-mean",  # how the losses of tokens are averaged
            loss_scale_factor=none(float),  # of seq-mean-token-sum-norm; None: data.max_response_length
            clip_ratio=0.2,  # how far new over old probability may move from 1 before its gradient ends
            clip_ratio_low=none(float),  # the same downwards; None: clip_ratio
            clip_ratio_high=none(float),  # the same upwards; None: clip_ratio
            clip_ratio_c=3.0,  # of the dual clip: the largest ratio that counts where the advantage is negative
            tau_pos=1.0,  # of sapo, where the advantage is positive
            tau_neg=1.05,  # of sapo, where it is negative
            entropy_coeff=0.0,  # of the policy's entropy, which the loss rewards
            calculate_entropy=True,  # as a metric; False spares the old log-probs the whole vocabulary's second pass
            use_kl_loss=False,  # adds the KL to the reference to the loss
            kl_loss_coef=0.001,  # its coefficient
            kl_loss_type="low_var_kl",  # the estimator of that KL
            max_tokens_per_device=16384,  # of a micro-batch: affects memory, not results; -1: what fits, in PPO
            param_offload=False,  # parameters are on the host between their uses
            **optim,
        )
    )
    config.critic = c(
        dict(
            path="",  # the model that the critic begins with; '': the policy's
            lora_rank=none(int),  # of the critic's adapters; None: the policy's
            lora_alpha=none(int),  # as model.lora_alpha; None: the policy's
            lr=1e-5,  # learning rate
            ppo_mini_batch_size=none(int),  # responses of one optimizer step; None: the actor's
            ppo_epochs=1,  # passes over a step's batch
            shuffle=False,  # draws the mini-batches anew in every epoch
            loss_agg_mode=none(str),  # how the losses of tokens are averaged; None: the actor's
            loss_scale_factor=none(float),  # of seq-mean-token-sum-norm; None: the actor's
            cliprange_value=0.5,  # how far a value may move from the old one before its gradient ends
            param_offload=False,  # parameters are on the host between their uses
            **optim,
        )
    )
    config.ref = c(
        dict(
            path="policy",  # policy: the one that the run begins with; or an HF directory; '': there is no reference
            param_offload=False,  # parameters are on the host between their uses
        )
    )
    config.rollout = c(
        dict(
            name="vllm",  # vllm and sglang are servers; inprocess: the trainer samples by itself, on its own devices
            python="",  # the interpreter that has vLLM or SGLang; '' is the trainer's own
            urls="",  # attach to running servers, separated by commas, and start none
            servers=1,  # how many are started
            port=0,  # of the first server, the others follow; 0 takes free ones
            mode="sync",  # async: the next steps' samples are drawn while the trainer learns
            max_staleness=1,  # async: by how many updates a sample's weights may be older than the policy that learns
            on_update="wait",  # async, of what is under way: wait for it, abort it to go on anew, keep it
            partial=False,  # async: responses that take long go on in the next steps
            n=1,  # responses to a prompt
            temperature=1.0,  # of training; log-probs are taken at it, too
            top_p=1.0,  # of training; 1.0 is off; what this and the next two cut away, the trainer does not
            top_k=-1,  # of training; -1 is off
            min_p=0.0,  # of training; 0.0 is off
            stop="",  # texts that end a response, separated by commas; \n, \t, \r, \, and \\ are characters of a text
            ignore_eos=False,  # only stop texts and the length end a response
            dtype="float32",  # of the engine's weights and products
            enforce_eager=True,  # vLLM captures no graphs: it starts sooner and samples slower on a GPU
            sleep_level=0,  # on the trainer's own GPU: servers give memory back while it learns; 0: they do not
            max_num_seqs=256,  # responses under way at once, of each server
            gpu_memory_utilization=0.4,  # share of a GPU's memory that a server takes
            kv_cache_memory_bytes=268435456,  # on a CPU: of the keys and values of the responses under way
            omp_threads=1,  # of a server on a CPU
            tensor_model_parallel_size=1,  # GPUs of one server
            devices="",  # the GPUs of the servers, as in CUDA_VISIBLE_DEVICES; '': all that there are
            engine_args="",  # more options of the server's own, as on a command line
            start_timeout_s=300.0,  # until a server is ready
            request_timeout_s=600.0,  # in which a server must answer one of the requests that it has
            health_timeout_s=60.0,  # a server that says no word for so long hangs
            max_restarts=5,  # of servers that break, in all; then the run ends with a checkpoint
            lora_sync="merge",  # of adapters: merge publishes whole weights, adapter the adapters alone (vLLM)
            publish_via="file",  # file: on this machine; tcp: servers on others pull the weights from the trainer
            publish_host="",  # of tcp: the trainer's address as the servers see it; '' is 127.0.0.1
            publish_dir="",  # '': nameless shared memory; a folder that both see when the server is in a container
            logp_tolerance=1e-3,  # largest |trainer - sampler| log-prob before step 1
            max_kl_jump=1.0,  # nats a token that rollout_corr/kl may rise by in a step; else the run stops; 0.0: off
            multi_turn=c(
                dict(
                    enable=False,  # conversations of several turns, with tools, a simulated user or an environment
                    max_assistant_turns=-1,  # the policy's; -1: until the response is full
                    max_user_turns=-1,  # of tools, users and environments; -1: any number
                    max_parallel_calls=1,  # calls of one turn that are answered
                    max_tool_response_length=256,  # characters of an answer
                    tool_response_truncate_side="middle",  # what is cut of a longer one
                    tool_config_path="",  # the tools: YAML, or Python with tools()
                    tool_timeout_s=10.0,  # for one call, and one answer of a user or an environment
                    format="hermes",  # of calls; plain: for models without a chat template
                    interaction="",  # 'path.py:Class': a simulated user
                    environment="",  # 'path.py:Class': its reward is the response's
                    allow_code=False,  # tools that run what the model writes
                )
            ),
            val_kwargs=c(
                dict(
                    temperature=0.0,  # of a test; 0.0 is greedy
                    top_p=1.0,  # of a test; 1.0 is off
                    top_k=-1,  # of a test; -1 is off
                    min_p=0.0,  # of a test; 0.0 is off
                    n=1,  # of a test: responses to a prompt
                )
            ),
        )
    )
    config.reward = c(
        dict(
            grader="",  # a rule for all rows; '': chosen by each row's data_source
            function="",  # 'path.py:name': compute_score(data_source, solution_str, ground_truth, extra_info)
            weights="",  # of the parts, as in 'rule_score=1,judge_score=0.5'; '': each of those there are counts 1
            workers=2,  # processes that run functions and the graders that may hang
            timeout_s=10.0,  # for one sample by one grader
            memory_bytes=2**31,  # of one such process
            allow_code=False,  # graders that run what a response says
            sandbox="strict",  # of programs, tools' too: basic takes the protections there are; container a service
            sandbox_url="",  # of container: an HTTP service with POST /run_code, as Sandbox Fusion
            score_on_error=none(float),  # of a sample whose grader failed; None: it is not learned from
            overlong_buffer_tokens=0,  # length_score: 0 up to this far from the end, then down to -1 at the end
            format_regex="",  # format_score: 1 where a response matches as a whole
            judge=c(
                dict(
                    api_type="",  # the provider; '': there is no judge
                    model="",  # the judge's name at its provider
                    base_url="",  # its address; '': the provider's own
                    preset="",  # prompts that come with jppo; '': those of the next two
                    system_prompt="",  # what the judge is; '': the preset's
                    scoring_prompt="",  # the question, with {prompt}, {response} and {ground_truth}; '': the preset's
                    max_score=10.0,  # what the judge is told is the best; scores are divided by it
                    temperature=0.0,  # of the judge's answers
                    max_tokens=512,  # of one answer
                    concurrency=32,  # requests under way at once
                    retries=4,  # of a request that failed
                    timeout_s=60.0,  # for one request
                    cache_dir="",  # keeps scores for later runs; '': none are kept
                )
            ),
            model=c(
                dict(
                    path="",  # a sequence classifier with one label; '': there is no reward model
                    engine="auto",  # auto: jax for the families that jppo knows, else transformers
                    python="",  # the interpreter that has torch or vLLM, where one is needed; '' is the trainer's own
                    device="cpu",  # of transformers, such as cuda:1
                    dtype="float32",  # of its weights and products
                    threads=1,  # of transformers and vLLM on a CPU
                    gpu_memory_utilization=0.2,  # of vLLM on a GPU
                    batch_size=32,  # texts that are scored at once
                    max_length=2048,  # tokens that it reads; of longer texts the end
                    normalize=False,  # by the running mean and deviation of all scores so far
                    clip=none(float),  # of the score, on both sides
                )
            ),
        )
    )
    config.trainer = c(
        dict(
            run_dir="runs/run",  # the folder of all that the run writes
            compile_cache="~/.cache/jppo",  # programs that XLA compiled, for later runs; '': none are kept
            logger="console,jsonl,tensorboard",  # where metrics go, separated by commas; also wandb, mlflow
            project_name="jppo",  # in wandb and mlflow
            experiment_name="",  # in wandb and mlflow; '': the name of run_dir
            seed=1,  # of everything that is drawn
            total_epochs=1,  # passes over the prompts
            total_training_steps=-1,  # of the run, all starts together; -1: by epochs
            critic_warmup=0,  # steps in which only the critic learns
            max_bad_steps=3,  # in a row with a loss or gradient that is no number: skipped, then the run stops
            save_freq=-1,  # steps from one checkpoint to the next; -1: at the end only
            test_freq=-1,  # steps from one test to the next; -1: none between the first and the last
            val_before_train=True,  # tests before the first step too
            val_only=False,  # tests the policy that a start would have, in RUN_DIR/val_only, and stops
            log_val_generations=8,  # prompts whose response is shown at each test, in the console and by the loggers
            resume_mode="auto",  # auto: from the last checkpoint of run_dir; disable: anew; or a checkpoint's path
            max_ckpt_to_keep=2,  # the last ones; the best is kept besides
            best_metric="val/score",  # of the saved checkpoints the best has most of it; '': none is kept for that
            save_contents="model,optimizer,extra",  # or less, or hf_model too: checkpoints/STEP/hf
            stage_timeout_s=3600.0,  # a stage that takes longer is stuck: the run ends with a checkpoint
            stop_exit_code=143,  # after SIGTERM or SIGHUP and a checkpoint; 75: a batch system's code for 'try again'
            stop_timeout_s=120.0,  # for the end of a run, SIGTERM's too; then it is ended by force
            nnodes=-1,  # hosts of this run, one process on each; -1: what the launcher says, 1 where there is none
            node_rank=-1,  # of this host, from 0; -1: the launcher's
            coordinator_address="",  # HOST:PORT of host 0, the same on all; '': the launcher's
            join_timeout_s=300.0,  # until all hosts are there
            host_timeout_s=60.0,  # a host that gives no sign for so long is lost: the others end
            profile_steps="",  # '3', '3,5' or '2-4': steps of which JAX's profiler writes a trace; '': none
        )
    )
    config.mesh = c(
        dict(
            data=-1,  # devices that share the rows; -1, here or below: those that are left
            fsdp=1,  # devices that share the rows, and the width of the parameters
            tensor=1,  # devices that share heads, MLP and vocabulary
            sequence=1,  # devices that share the positions of a row
        )
    )
    return config.lock()


def sft_default() -> ml_collections.ConfigDict:
    """All settings of supervised fine-tuning; sections and names as for PPO, with one optimizer in `optim`."""
    ppo = default()
    c = ml_collections.ConfigDict
    config = c(dict(model=ppo.model, mesh=ppo.mesh))
    config.data = c(
        {
            k: ppo.data[k]
            for k in (*SHAPE_SETTINGS, "train_files", "train_batch_size", "shuffle", "system_prompt", "custom_cls")
        }
    )
    config.data.learn_turns = "last"  # of chats in `messages`; all: every turn of the assistant
    optim = ("lr", *OPTIM, "max_tokens_per_device")
    config.optim = c({k: ppo.actor[k] for k in optim})
    logged = ("logger", "project_name", "experiment_name")
    kept = ("save_freq", "resume_mode", "max_ckpt_to_keep", "stage_timeout_s", "stop_exit_code", "stop_timeout_s")
    config.trainer = c(
        {
            k: ppo.trainer[k]
            for k in ("run_dir", "compile_cache", *logged, "seed", "total_epochs", "total_training_steps", *kept)
        }
    )
    return config.lock()


def reward_model_default() -> ml_collections.ConfigDict:
    """All settings of a reward model's training: those of fine-tuning, held-out pairs and the loss of pairs."""
    ppo, config = default(), sft_default()
    with config.unlocked():
        del config.data.learn_turns, config.model.logprob_chunk_bytes  # of texts that are not imitated
        config.data.val_files = ppo.data.val_files
        config.trainer.test_freq = ppo.trainer.test_freq
        config.loss = ml_collections.ConfigDict(
            dict(
                margin=0.0,  # by which the chosen response is to be scored higher
                margin_column="",  # the column of the rows that has each pair's own; '': all have loss.margin
                center_rewards_coefficient=0.0,  # of (r_chosen + r_rejected)^2, which holds scores around 0
            )
        )
    return config.lock()
