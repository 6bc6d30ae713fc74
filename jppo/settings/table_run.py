"""Settings of the reward, and of the run: its folder, length, tests, checkpoints, hosts."""

from jppo.settings import texts
from jppo.settings.setting import Setting as S
from jppo.settings.steps import parse_steps

_JUDGE, _MODEL, _STEPS = "reward.judge.api_type", "reward.model.path", "reward.model.step_aggregation"

REWARD = (
    S("grader", "", "Rule for all rows. '': each row's data_source names it", only="reward.function="),
    S("function", "", "User-defined reward, PATH.py:NAME of compute_score(data_source, solution_str, ground_truth,"
      " extra_info)"),
    S("weights", "", "Weights of the parts, as in rule_score=1,judge_score=0.5. '': 1 for each part"),
    S("workers", 2, "Processes for reward functions and for graders that may hang", bounds="[1,"),
    S("timeout_s", 10.0, "Time limit of one sample in one grader", unit="seconds", bounds="(0,"),
    S("memory_bytes", 2**31, "Memory of one grader process", unit="bytes", bounds=f"[{2**28},"),
    S("allow_code", False, "Permission for graders that run code of a response"),
    S("sandbox", "strict", "Sandbox of graded programs and tools. strict: all protections; basic: those that the"
      " kernel has; container: a service", choices=("strict", "basic", "container")),
    S("sandbox_url", "", "Address of the sandbox service, HTTP with POST /run_code as Sandbox Fusion",
      only="reward.sandbox=container"),
    S("score_on_error", None, "Score of a sample whose grader failed. None: the sample is not learned", kind=float),
    S("overlong_buffer_tokens", 0, "Length of length_score's slope, from 0 down to -1 at max_response_length",
      unit="tokens", bounds="[0,"),
    S("format_regex", "", "Pattern of format_score: 1 where a whole response matches"),
)  # fmt: skip

JUDGE = (
    S("api_type", "", "Provider of the judge. '': no judge", choices=("", "openai", "dashscope", "gemini", "claude")),
    S("model", "", "Name of the judge at its provider", only=_JUDGE),
    S("base_url", "", "Address of the provider. '': its public one", only=_JUDGE),
    S("preset", "", "Prompts that come with jppo. '': system_prompt and scoring_prompt",
      choices=("", "math", "code", "dialogue", "safety"), only=_JUDGE),
    S("system_prompt", "", "System prompt of the judge. '': the preset's", only=_JUDGE),
    S("scoring_prompt", "", "Question with {prompt}, {response} and {ground_truth}. '': the preset's", only=_JUDGE),
    S("max_score", 10.0, "Best score that the judge may give; scores are divided by it", bounds="(0,", only=_JUDGE),
    S("temperature", 0.0, "Temperature of the judge", bounds="[0,", only=_JUDGE),
    S("max_tokens", 512, "Longest answer of the judge", unit="tokens", bounds="[1,", only=_JUDGE),
    S("concurrency", 32, "Concurrent requests", bounds="[1,", only=_JUDGE),
    S("retries", 4, "Retries of a failed request", bounds="[0,", only=_JUDGE),
    S("timeout_s", 60.0, "Time limit of a request", unit="seconds", bounds="(0,", only=_JUDGE),
    S("cache_dir", "", "Folder that caches scores for later runs. '': no cache", only=_JUDGE),
)  # fmt: skip

REWARD_MODEL = (
    S("path", "", "Sequence classifier with one label, or token classifier. '': no reward model"),
    S("engine", "auto", "Engine of the reward model. auto: jax for the families that jppo has, else transformers",
      choices=("auto", "jax", "transformers", "vllm"), only=_MODEL),
    S("python", "", "Python interpreter with torch or vLLM, where one is needed. '': the trainer's", only=_MODEL),
    S("device", "cpu", "Device of transformers, such as cuda:1", only=_MODEL),
    S("dtype", "float32", "Dtype of the weights and products", choices=("float32", "bfloat16"), only=_MODEL),
    S("threads", 1, "Threads of transformers and vLLM on a CPU", bounds="[1,", only=_MODEL),
    S("gpu_memory_utilization", 0.2, "Fraction of a GPU's memory for vLLM", bounds="(0, 1]", only=_MODEL),
    S("batch_size", 32, "Texts that are scored together", bounds="[1,", only=_MODEL),
    S("max_length", 2048, "Longest input; of a longer text the end is read", unit="tokens", bounds="[2,",
      only=_MODEL),
    S("normalize", False, "Normalization by the running mean and standard deviation of the scores", only=_MODEL),
    S("clip", None, "Clip range of a score around 0. None: no clip", kind=float, bounds="(0,", only=_MODEL),
    S("step_aggregation", "", "Score of a response from its steps' scores by a token classifier. '': a sequence"
      " classifier scores the response", choices=("", "last", "min", "prod", "sum", "mean"), only=_MODEL),
    S("step_delimiter", "\n\n", "Text between the steps of a response", only=_STEPS),
    S("step_token", "", "Text after each step in the model's input, where its score is read. '': step_delimiter",
      only=_STEPS),
)  # fmt: skip

TRAINER = (
    S("run_dir", "runs/run", "Folder of everything that the run writes", required=True),
    S("compile_cache", "~/.cache/jppo", "Folder of compiled XLA programs for later runs. '': no cache"),
    S("logger", "console,jsonl,tensorboard", "Sinks of metrics, separated by commas: console, jsonl, tensorboard,"
      " wandb, mlflow", form=texts.loggers),
    S("metrics_port", 0, "Port of the last step's metrics for Prometheus, at /metrics. 0: none", bounds="[0,65535]"),
    S("metrics_host", "127.0.0.1", "Address that metrics_port listens on"),
    S("traces", False, "OpenTelemetry spans of stages, samples and rewards, by OTLP as the variables OTEL_* say"),
    S("project_name", "jppo", "Project in wandb and mlflow"),
    S("experiment_name", "", "Name of the run in wandb and mlflow. '': the name of run_dir"),
    S("seed", 1, "Seed of everything that is sampled", bounds="[0,4294967295]"),
    S("total_epochs", 1, "Epochs over the prompts", bounds="[1,"),
    S("total_training_steps", -1, "Steps of the run, over all its starts. -1: by total_epochs",
      bounds="[1,", off=-1),
    S("critic_warmup", 0, "First steps in which only the critic learns", bounds="[0,"),
    S("max_bad_steps", 3, "Skipped steps (non-finite loss or gradient) in a row before the run stops",
      bounds="[1,"),
    S("save_freq", -1, "Interval of checkpoints. -1: at the end only", unit="steps", bounds="[1,", off=-1),
    S("test_freq", -1, "Interval of tests. -1: the first and the last only", unit="steps", bounds="[1,", off=-1),
    S("val_before_train", True, "Test before the first step"),
    S("val_only", False, "Test of the policy that a start would resume, in RUN_DIR/val_only, and no training"),
    S("log_val_generations", 8, "Prompts of a test whose responses are logged", bounds="[0,"),
    S("token_samples", 4, "Responses of each step whose tokens are logged with reward, value, advantage and log-ratios."
      " 0: none", bounds="[0,"),
    S("resume_mode", "auto", "Start of the run. auto: from the last checkpoint of run_dir; disable: step 0; or the path"
      " of a checkpoint"),
    S("max_ckpt_to_keep", 2, "Checkpoints that are kept, the last ones; the best is kept in addition", bounds="[1,"),
    S("best_metric", "val/score", "Metric whose highest value marks the best checkpoint. '': none is marked"),
    S("save_contents", "model,optimizer,extra", "Contents of a checkpoint, separated by commas; hf_model adds"
      " checkpoints/STEP/hf", form=texts.save_contents),
    S("stage_timeout_s", 3600.0, "Time limit of a stage; the run then ends with a checkpoint", unit="seconds",
      bounds="(0,"),
    S("stop_exit_code", 143, "Exit code after SIGTERM or SIGHUP and a checkpoint. 75: 'try again' for a batch system",
      choices=(143, 75)),
    S("stop_timeout_s", 120.0, "Time limit of the end of a run; then it is killed", unit="seconds", bounds="(0,"),
    S("nnodes", -1, "Hosts of the run, one process on each. -1: from the launcher, or 1", bounds="[1,",
      off=-1),
    S("node_rank", -1, "Rank of this host, from 0. -1: from the launcher", bounds="[0,", off=-1),
    S("coordinator_address", "", "HOST:PORT of host 0, the same on all hosts. '': from the launcher"),
    S("join_timeout_s", 300.0, "Time limit for all hosts to join", unit="seconds", bounds="(0,"),
    S("host_timeout_s", 60.0, "Time without a heartbeat before a host counts as lost and the others end",
      unit="seconds", bounds="(0,"),
    S("profile_steps", "", "Steps with a trace by JAX's profiler, as in '3', '3,5' or '2-4'. '': none",
      form=lambda text: parse_steps(text, "trainer.profile_steps")),
)  # fmt: skip
