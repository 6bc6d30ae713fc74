"""Settings of the reward, and of the run: its folder, length, tests, checkpoints, hosts."""

import dataclasses

from jppo.settings import texts
from jppo.settings.setting import Section, setting
from jppo.settings.texts import parse_steps

_JUDGE, _MODEL, _STEPS = "reward.judge.api_type", "reward.model.path", "reward.model.step_aggregation"


@dataclasses.dataclass(frozen=True)
class Judge(Section):
    """A judge over HTTP."""

    # fmt: off
    api_type: str = setting("", "Provider of the judge. '': no judge",
        choices=("", "openai", "dashscope", "gemini", "claude"))
    model: str = setting("", "Name of the judge at its provider", only=_JUDGE)
    base_url: str = setting("", "Address of the provider. '': its public one", only=_JUDGE)
    preset: str = setting("", "Prompts that come with jppo. '': system_prompt and scoring_prompt",
        choices=("", "math", "code", "dialogue", "safety"), only=_JUDGE)
    system_prompt: str = setting("", "System prompt of the judge. '': the preset's", only=_JUDGE)
    scoring_prompt: str = setting("", "Question with {prompt}, {response} and {ground_truth}. '': the preset's",
        only=_JUDGE)
    max_score: float = setting(10.0, "Best score that the judge may give; scores are divided by it", bounds="(0,",
        only=_JUDGE)
    temperature: float = setting(0.0, "Temperature of the judge", bounds="[0,", only=_JUDGE)
    max_tokens: int = setting(512, "Longest answer of the judge", unit="tokens", bounds="[1,", only=_JUDGE)
    concurrency: int = setting(32, "Concurrent requests", bounds="[1,", only=_JUDGE)
    retries: int = setting(4, "Retries of a failed request", bounds="[0,", only=_JUDGE)
    timeout_s: float = setting(60.0, "Time limit of a request", unit="seconds", bounds="(0,", only=_JUDGE)
    cache_dir: str = setting("", "Folder that caches scores for later runs. '': no cache", only=_JUDGE)
    # fmt: on


@dataclasses.dataclass(frozen=True)
class RewardModel(Section):
    """A reward model."""

    # fmt: off
    path: str = setting("", "Sequence classifier with one label, or token classifier. '': no reward model")
    engine: str = setting("auto", "Engine of the reward model. auto: jax for the families that jppo has, else"
        " transformers", choices=("auto", "jax", "transformers", "vllm"), only=_MODEL)
    python: str = setting("", "Python interpreter with torch or vLLM, where one is needed. '': the trainer's",
        only=_MODEL)
    device: str = setting("cpu", "Device of transformers, such as cuda:1", only=_MODEL)
    dtype: str = setting("float32", "Dtype of the weights and products", choices=("float32", "bfloat16"), only=_MODEL)
    threads: int = setting(1, "Threads of transformers and vLLM on a CPU", bounds="[1,", only=_MODEL)
    gpu_memory_utilization: float = setting(0.2, "Fraction of a GPU's memory for vLLM", bounds="(0, 1]", only=_MODEL)
    batch_size: int = setting(32, "Texts that are scored together", bounds="[1,", only=_MODEL)
    max_length: int = setting(2048, "Longest input; of a longer text the end is read", unit="tokens", bounds="[2,",
        only=_MODEL)
    normalize: bool = setting(False, "Normalization by the running mean and standard deviation of the scores",
        only=_MODEL)
    clip: float | None = setting(None, "Clip range of a score around 0. None: no clip", bounds="(0,", only=_MODEL)
    step_aggregation: str = setting("", "Score of a response from its steps' scores by a token classifier. '': a"
        " sequence classifier scores the response", choices=("", "last", "min", "prod", "sum", "mean"), only=_MODEL)
    step_delimiter: str = setting("\n\n", "Text between the steps of a response", only=_STEPS)
    step_token: str = setting("", "Text after each step in the model's input, where its score is read. '':"
        " step_delimiter", only=_STEPS)
    # fmt: on


@dataclasses.dataclass(frozen=True)
class Reward(Section):
    """The reward of a response."""

    # fmt: off
    grader: str = setting("", "Rule for all rows. '': each row's data_source names it", only="reward.function=")
    function: str = setting("", "User-defined reward, PATH.py:NAME, or PATH.py for its compute_score(data_source,"
        " solution_str, ground_truth, extra_info)")
    weights: str = setting("", "Weights of the parts, as in rule_score=1,judge_score=0.5. '': 1 for each part")
    workers: int = setting(2, "Processes for reward functions and for graders that may hang", bounds="[1,")
    timeout_s: float = setting(10.0, "Time limit of one sample in one grader", unit="seconds", bounds="(0,")
    memory_bytes: int = setting(2**31, "Memory of one grader process", unit="bytes", bounds=f"[{2**28},")
    allow_code: bool = setting(False, "Permission for graders that run code of a response")
    sandbox: str = setting("strict", "Sandbox of graded programs and tools. strict: all protections; basic: those that"
        " the kernel has; container: a service", choices=("strict", "basic", "container"))
    sandbox_url: str = setting("", "Address of the sandbox service, HTTP with POST /run_code as Sandbox Fusion",
        only="reward.sandbox=container")
    score_on_error: float | None = setting(None, "Score of a sample whose grader failed. None: the sample is not"
        " learned")
    overlong_buffer_tokens: int = setting(0, "Length of length_score's slope, from 0 down to -1 at max_response_length",
        unit="tokens", bounds="[0,")
    format_regex: str = setting("", "Pattern of format_score: 1 where a whole response matches")
    judge: Judge = dataclasses.field(default_factory=Judge)
    model: RewardModel = dataclasses.field(default_factory=RewardModel)
    # fmt: on

    @property
    def sandbox_choice(self) -> tuple[str, str]:
        """The sandbox's mode and the service's address."""
        return self.sandbox, self.sandbox_url


@dataclasses.dataclass(frozen=True)
class TrainingRun(Section):
    """The run settings of every training command."""

    # fmt: off
    run_dir: str = setting("runs/run", "Folder of everything that the run writes", required=True)
    compile_cache: str = setting("~/.cache/jppo", "Folder of compiled XLA programs for later runs. '': no cache")
    logger: str = setting("console,jsonl,tensorboard", "Sinks of metrics, separated by commas: console, jsonl,"
        " tensorboard, wandb, mlflow, swanlab, clearml, trackio", form=texts.loggers)
    metrics_port: int = setting(0, "Port of the last step's metrics for Prometheus, at /metrics. 0: none",
        bounds="[0,65535]")
    metrics_host: str = setting("127.0.0.1", "Address that metrics_port listens on")
    project_name: str = setting("jppo", "Project in wandb, mlflow, swanlab, clearml and trackio")
    experiment_name: str = setting("", "Name of the run in these. '': the name of run_dir")
    seed: int = setting(1, "Seed of everything that is sampled", bounds="[0,4294967295]")
    total_epochs: int = setting(1, "Epochs over the prompts", bounds="[1,")
    total_training_steps: int = setting(-1, "Steps of the run, over all its starts. -1: by total_epochs", bounds="[1,",
        off=-1)
    save_freq: int = setting(-1, "Interval of checkpoints. -1: at the end only", unit="steps", bounds="[1,", off=-1)
    resume_mode: str = setting("auto", "Start of the run. auto: from the last checkpoint of run_dir; disable: step 0;"
        " or the path of a checkpoint")
    max_ckpt_to_keep: int = setting(2, "Checkpoints that are kept, the last ones; the best is kept in addition",
        bounds="[1,")
    stage_timeout_s: float = setting(3600.0, "Time limit of a stage; the run then ends with a checkpoint",
        unit="seconds", bounds="(0,")
    stop_exit_code: int = setting(143, "Exit code after SIGTERM or SIGHUP and a checkpoint. 75: 'try again' for a"
        " batch system", choices=(143, 75))
    stop_timeout_s: float = setting(120.0, "Time limit of the end of a run; then it is killed", unit="seconds",
        bounds="(0,")
    # fmt: on


@dataclasses.dataclass(frozen=True)
class TestedRun(TrainingRun):
    """The run settings of commands that also test."""

    # fmt: off
    test_freq: int = setting(-1, "Interval of tests. -1: the first and the last only", unit="steps", bounds="[1,",
        off=-1)
    # fmt: on


@dataclasses.dataclass(frozen=True)
class Trainer(TestedRun):
    """The run: its folder, length, tests, checkpoints, hosts."""

    # fmt: off
    traces: bool = setting(False, "OpenTelemetry spans of stages, samples and rewards, by OTLP as the variables OTEL_*"
        " say")
    critic_warmup: int = setting(0, "First steps in which only the critic learns", bounds="[0,")
    max_bad_steps: int = setting(3, "Skipped steps (non-finite loss or gradient) in a row before the run stops",
        bounds="[1,")
    val_before_train: bool = setting(True, "Test before the first step")
    val_only: bool = setting(False, "Test of the policy that a start would resume, in RUN_DIR/val_only, and no"
        " training")
    log_val_generations: int = setting(8, "Prompts of a test whose responses are logged", bounds="[0,")
    token_samples: int = setting(4, "Responses of each step whose tokens are logged with reward, value, advantage and"
        " log-ratios. 0: none", bounds="[0,")
    best_metric: str = setting("val/score", "Metric whose highest value marks the best checkpoint. '': none is marked")
    save_contents: str = setting("model,optimizer,extra", "Contents of a checkpoint, separated by commas; hf_model"
        " adds checkpoints/STEP/hf", form=texts.save_contents)
    nnodes: int = setting(-1, "Hosts of the run, one process on each. -1: from the launcher, or 1", bounds="[1,",
        off=-1)
    node_rank: int = setting(-1, "Rank of this host, from 0. -1: from the launcher", bounds="[0,", off=-1)
    coordinator_address: str = setting("", "HOST:PORT of host 0, the same on all hosts. '': from the launcher")
    join_timeout_s: float = setting(300.0, "Time limit for all hosts to join", unit="seconds", bounds="(0,")
    host_timeout_s: float = setting(60.0, "Time without a heartbeat before a host counts as lost and the others end",
        unit="seconds", bounds="(0,")
    profile_steps: str = setting("", "Steps with a trace by JAX's profiler, as in '3', '3,5' or '2-4'. '': none",
        form=lambda text: parse_steps(text, "trainer.profile_steps"))
    # fmt: on
