"""Settings of the rollout, of the reward, and of the run.

The rollout: engine, servers, sampling, publishing, conversations, tests. The run: folder, length, tests, checkpoints,
hosts.
"""

import dataclasses
import functools

from jppo.settings import texts
from jppo.settings.parts import ENGINES
from jppo.settings.setting import Section, setting

_SERVERS, _ASYNC, _SENT = "rollout.name!=inprocess", "rollout.mode=async", "rollout.publish_via!=file"
_MASKED = "rollout.mask_replay"
_TURNS, _TOOLS = "rollout.multi_turn.enable", "rollout.multi_turn.tool_config_path"
_AGENT, _FORMATS = "rollout.agent", ("hermes", "openai", "qwen3", "qwen3_coder", "plain")
_JUDGE, _MODEL, _STEPS = "reward.judge.api_type", "reward.model.path", "reward.model.step_aggregation"


# fmt: off

@dataclasses.dataclass(frozen=True)
class MultiTurn(Section):
    """Conversations of several turns."""

    enable: bool = setting(False, "Conversations of several turns, with tools, a simulated user or an environment")
    max_assistant_turns: int = setting(-1, "Turns of the policy. -1: until the response is full", bounds="[1,", off=-1,
        only=_TURNS)
    max_user_turns: int = setting(-1, "Turns of tools, users and environments. -1: any number", bounds="[1,", off=-1,
        only=_TURNS)
    max_parallel_calls: int = setting(1, "Tool calls of one turn that are answered", bounds="[1,", only=_TOOLS)
    max_tool_response_length: int = setting(256, "Longest answer of a tool", unit="characters", bounds="[1,",
        only=_TOOLS)
    tool_response_truncate_side: str = setting("middle", "Part of a longer answer that is cut",
        choices=("left", "middle", "right"), only=_TOOLS)
    tool_config_path: str = setting("", "Tools: a YAML file, or a Python file with tools()", only=_TURNS)
    tool_timeout_s: float = setting(10.0, "Time limit of a tool call, and of an answer of a user or an environment",
        unit="seconds", bounds="(0,", only=_TURNS)
    format: str = setting("hermes", "Syntax of tool calls. openai and qwen3: as hermes; plain: for models without a"
        " chat template", choices=_FORMATS, only=_TURNS)
    interaction: str = setting("", "User-defined simulated user, PATH.py:CLASS or MODULE:CLASS", only=_TURNS)
    environment: str = setting("", "User-defined environment, PATH.py:CLASS or MODULE:CLASS; its reward is the"
        " response's", only=_TURNS)
    allow_code: bool = setting(False, "Permission for tools that run what the model writes", only=_TOOLS)


@dataclasses.dataclass(frozen=True)
class ValKwargs(Section):
    """Sampling of tests."""

    temperature: float = setting(0.0, "Temperature of a test. 0.0: greedy", bounds="[0,")
    top_p: float = setting(1.0, "Nucleus of a test. 1.0: all tokens", bounds="(0, 1]")
    top_k: int = setting(-1, "Likeliest tokens of a test that are kept. -1: all", bounds="[1,", off=-1)
    min_p: float = setting(0.0, "Least probability in a test, relative to the likeliest token. 0.0: none",
        bounds="[0, 1)")
    n: int = setting(1, "Responses to each prompt of a test", bounds="[1,")


@dataclasses.dataclass(frozen=True)
class Rollout(Section):
    """Sampling, servers, publishing."""

    name: str = setting("vllm", "Rollout engine. vllm and sglang are servers; inprocess samples on the trainer's"
        " devices", choices=ENGINES)
    python: str = setting("", "Python interpreter with vLLM or SGLang. '': the trainer's", only=_SERVERS)
    urls: str = setting("", "Addresses of running servers, separated by commas. file:PATH or dns://NAME:PORT: looked"
        " up again during the run, as servers join and leave. '': servers are started", only=_SERVERS)
    servers: int = setting(-1, "Number of servers to start on a host. -1: as many as its GPUs hold, 1 on a CPU",
        bounds="[1,", off=-1, only=_SERVERS)
    port: int = setting(0, "Port of the first server; the others follow. 0: free ports", bounds="[0,", only=_SERVERS)
    mode: str = setting("sync", "Order of sampling and learning. async: the samples of the next steps are generated"
        " while the trainer learns", choices=("sync", "async"))
    max_staleness: int = setting(1, "Largest age of a sample's weights", unit="updates", bounds="[0,", only=_ASYNC)
    on_update: str = setting("wait", "Treatment of running requests at an update. wait: until they finish; abort: stop"
        " and resume; keep: continue under the new weights", choices=("wait", "abort", "keep"), only=_ASYNC)
    partial: bool = setting(False, "Continuation of long responses in the next steps", only=_ASYNC)
    n: int = setting(1, "Responses to each prompt", bounds="[1,")
    temperature: float = setting(1.0, "Sampling temperature; log-probs are computed at it too", bounds="[0,")
    top_p: float = setting(1.0, "Nucleus of sampling; the trainer's log-probs apply top_p, top_k and min_p with"
        " mask_replay. 1.0: all tokens", bounds="(0, 1]")
    top_k: int = setting(-1, "Likeliest tokens that are kept. -1: all", bounds="[1,", off=-1)
    min_p: float = setting(0.0, "Least probability relative to the likeliest token. 0.0: none", bounds="[0, 1)")
    mask_replay: bool = setting(False, "Sampling mask replay: log-probs, entropies and KLs are over the tokens that"
        " top_p, top_k and min_p kept, as the rollout engine returns them")
    mask_replay_tokens: int = setting(256, "Largest number of kept tokens that is replayed. A token with more is scored"
        " over the whole vocabulary and counted in rollout/mask_overflow; each takes 4 bytes in every position of a"
        " row", unit="tokens", bounds="[1,", only=_MASKED)
    stop: str = setting("", r"Texts that end a response, separated by commas; \n, \t, \r, \, and \\ are escapes",
        form=texts.stop_texts)
    ignore_eos: bool = setting(False, "End of a response by stop texts and length alone")
    routing_replay: bool = setting(False, "Routing replay: log-probs and updates use the experts that the rollout"
        " engine chose")
    dtype: str = setting("float32", "Dtype of the engine's weights and products",
        choices=("float32", "bfloat16", "float16"))
    quantization: str = setting("none", "Weights of vLLM's linear layers, which it quantises as they are published in"
        " bfloat16. Needs algorithm.old_logprob=correction. On a CPU fp8_per_channel only",
        choices=("none", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block"), only=_SERVERS)
    enforce_eager: bool = setting(False, "vLLM without CUDA graphs, as always on a CPU: starts sooner and samples more"
        " slowly")
    sleep_level: int = setting(0, "Sleep of servers on the trainer's GPU while it learns. 0: none; 1 and 2: vLLM's"
        " levels", choices=(0, 1, 2), only=_SERVERS)
    max_num_seqs: int = setting(256, "Concurrent responses of a server", bounds="[1,")
    max_concurrent_requests: int = setting(-1, "Requests in flight at a server, which queues those over max_num_seqs."
        " -1: max_num_seqs, at least 256", bounds="[1,", off=-1, only=_SERVERS)
    gpu_memory_utilization: float = setting(0.4, "Fraction of a GPU's memory for a server", bounds="(0, 1]",
        only=_SERVERS)
    kv_cache_memory_bytes: int = setting(-1, "KV cache of a server, or of the in-process engine on a device. -1: on a"
        " CPU 256 MiB or 1 GiB; on a GPU what gpu_memory_utilization leaves, which vLLM measures; in-process no limit",
        unit="bytes", bounds="[1,", off=-1)
    omp_threads: int = setting(-1, "Threads of a server on a CPU. -1: OMP_NUM_THREADS, or 1 for a model below 10M"
        " parameters, or all cores of its share, half of them with rollout.mode=async",
        bounds="[1,", off=-1, only=_SERVERS)
    tensor_model_parallel_size: int = setting(1, "GPUs of one server", bounds="[1,", only=_SERVERS)
    devices: str = setting("", "GPUs of the servers, as in CUDA_VISIBLE_DEVICES. '': all", only=_SERVERS)
    engine_args: str = setting("", "Further options of the server's command line", only=_SERVERS)
    start_timeout_s: float = setting(900.0, "Time limit of a server's start", unit="seconds", bounds="(0,",
        only=_SERVERS)
    request_timeout_s: float = setting(600.0, "Time in which a server must answer one of its requests", unit="seconds",
        bounds="(0,", only=_SERVERS)
    health_timeout_s: float = setting(60.0, "Time without a health reply before a server counts as hung",
        unit="seconds", bounds="(0,", only=_SERVERS)
    max_restarts: int = setting(5, "Restarts of broken servers, in all; then the run ends with a checkpoint",
        bounds="[0,", only=_SERVERS)
    lora_sync: str = setting("merge", "Publish of adapters. merge: merged into whole weights; adapter: adapters alone"
        " (vLLM)", choices=("merge", "adapter"))
    publish_via: str = setting("file", "Transport of the weights. file: on this machine; tcp: buckets over a socket,"
        " to any machine; nccl: to other GPUs; ipc: to servers on the trainer's GPUs (both not yet run on hardware);"
        " auto: file or tcp, by the servers' addresses", choices=("file", "tcp", "nccl", "ipc", "auto"), only=_SERVERS)
    publish_host: str = setting("", "Address of the trainer as the servers see it. '': they are on this machine",
        only=_SENT)
    publish_delta: bool = setting(False, "Publish of the elements that changed since the last one, to servers that have"
        " it; others get whole weights. Needs tcp, and host memory for a copy of the weights", only=_SENT)
    publish_dir: str = setting("", "Folder of published weights, for servers in a container. '': nameless shared"
        " memory", only=_SERVERS)
    logp_tolerance: float = setting(-1.0, "Largest log-prob mismatch between trainer and rollout of 95% of the tokens,"
        " before step 1 and after each publish; of the mean, a quarter of it. -1: 0.001, 0.1"
        " if rollout.dtype or model.compute_dtype is float16, 0.6 if one is bfloat16, 1.5 with rollout.quantization",
        unit="nats", bounds="[0,", off=-1)
    agent: str = setting("", "Agent program that asks the policy through OpenAI's or Anthropic's API, one process per"
        " sample: a command line, or PATH.py:FUNCTION. '': none")
    agent_reward: str = setting("graders", "Reward of an agent's episode. graders: as without one; exit: 1 for exit"
        " code 0, 0 for 1; reported: by the agent", choices=("graders", "exit", "reported"), only=_AGENT)
    agent_format: str = setting("hermes", "Syntax of the policy's tool calls, as rollout.multi_turn.format",
        choices=_FORMATS, only=_AGENT)
    agent_timeout_s: float = setting(600.0, "Time limit of an episode; its processes are then killed and its sample is"
        " left out", unit="seconds", bounds="(0,", only=_AGENT)
    agent_concurrency: int = setting(256, "Agent programs that run at once on a host", bounds="[1,", only=_AGENT)
    agent_branches: int = setting(4, "Trajectories of a conversation or an agent's episode that are trained on; a"
        " changed history begins a new one", bounds="[1,")
    history: str = setting("template", "Earlier turns of the policy in a conversation. template: as the chat template"
        " renders them, in a new trajectory where it changes them; sampled: as they were sampled",
        choices=("template", "sampled"))
    max_kl_jump: float = setting(1.0, "Largest rise of rollout_corr/kl in a step; a larger one stops the run. 0.0: no"
        " limit", unit="nats", bounds="[0,")
    multi_turn: MultiTurn = dataclasses.field(default_factory=MultiTurn)
    val_kwargs: ValKwargs = dataclasses.field(default_factory=ValKwargs)

    @property
    def least_servers(self) -> int:
        """Returns the number of servers; 1 while the GPUs that decide it are unknown."""
        return max(self.servers, 1)

    @functools.cached_property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end a response."""
        return texts.stop_texts(self.stop)

    @functools.cached_property
    def has_branches(self) -> bool:
        """Whether an episode may be several trajectories: an agent's, or one whose template changes earlier turns."""
        turns = self.multi_turn.enable and self.multi_turn.format != "plain" and self.history == "template"
        return bool(self.agent) or turns

    @property
    def cache_on_cpu(self) -> int:
        """Returns the bytes of the KV cache on a CPU."""
        if self.kv_cache_memory_bytes > 0:
            return self.kv_cache_memory_bytes
        return 2**30 if self.name == "inprocess" else 2**28


@dataclasses.dataclass(frozen=True)
class Judge(Section):
    """A judge over HTTP."""

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


@dataclasses.dataclass(frozen=True)
class RewardModel(Section):
    """A reward model."""

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


@dataclasses.dataclass(frozen=True)
class GradedCode(Section):
    """The rule `code`."""

    tests: str = setting("strict", "Process of asserts. strict: their own, and rows whose asserts need the program's"
        " are left out. native: the program's, which can cheat", choices=("strict", "native"))


@dataclasses.dataclass(frozen=True)
class RewardSection(Section):
    """The reward of a response."""

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
    code: GradedCode = dataclasses.field(default_factory=GradedCode)
    judge: Judge = dataclasses.field(default_factory=Judge)
    model: RewardModel = dataclasses.field(default_factory=RewardModel)

    @property
    def sandbox_choice(self) -> tuple[str, str]:
        """The sandbox's mode and the service's address."""
        return self.sandbox, self.sandbox_url


@dataclasses.dataclass(frozen=True)
class Run(Section):
    """What every learner needs to know of its run."""

    run_dir: str = setting("", "Folder of the servers' logs. '': a temporary one")
    compile_cache: str = setting("~/.cache/jppo", "Folder of compiled XLA programs for later runs. '': no cache")
    seed: int = setting(1, "Seed of everything that is sampled", bounds="[0,4294967295]")
    total_training_steps: int = setting(-1, "Steps of the run, over all its starts. -1: by total_epochs", bounds="[1,",
        off=-1)


@dataclasses.dataclass(frozen=True)
class TrainingRun(Run):
    """The run settings of every training command."""

    run_dir: str = setting("runs/run", "Folder of everything that the run writes", required=True)
    logger: str = setting("console,jsonl,tensorboard", "Sinks of metrics, separated by commas: console, jsonl,"
        " tensorboard, wandb, mlflow, swanlab, clearml, trackio", form=texts.loggers)
    metrics_port: int = setting(0, "Port of the last step's metrics for Prometheus, at /metrics. 0: none",
        bounds="[0,65535]")
    metrics_host: str = setting("127.0.0.1", "Address that metrics_port listens on")
    project_name: str = setting("jppo", "Project in wandb, mlflow, swanlab, clearml and trackio")
    experiment_name: str = setting("", "Name of the run in these. '': the name of run_dir")
    total_epochs: int = setting(1, "Epochs over the prompts", bounds="[1,")
    save_freq: int = setting(-1, "Interval of checkpoints. -1: at the end only", unit="steps", bounds="[1,", off=-1)
    resume_mode: str = setting("auto", "Start of the run. auto: from the last checkpoint of run_dir; disable: step 0;"
        " or the path of a checkpoint")
    max_ckpt_to_keep: int = setting(2, "Checkpoints that are kept, the last ones; the best is kept in addition",
        bounds="[1,")
    stage_timeout_s: float = setting(3600.0, "Time limit of a stage; the run then ends with a checkpoint",
        unit="seconds", bounds="(0,")
    stop_exit_code: int = setting(143, "Exit code after SIGTERM or SIGHUP and a checkpoint. 75: 'try again' for a"
        " batch system", choices=(143, 75))
    stop_timeout_s: float = setting(120.0, "Time limit of the end of a run, except after Ctrl-C; then it is killed",
        unit="seconds", bounds="(0,")


@dataclasses.dataclass(frozen=True)
class TestedRun(TrainingRun):
    """The run settings of commands that also test."""

    test_freq: int = setting(-1, "Interval of tests. -1: the first and the last only", unit="steps", bounds="[1,",
        off=-1)


@dataclasses.dataclass(frozen=True)
class Trainer(TestedRun):
    """The run: its folder, length, tests, checkpoints, hosts."""

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
        form=lambda text: texts.parse_steps(text, "trainer.profile_steps"))
    replay_steps: str = setting("", "Steps that RUN_DIR/replay records for `jppo replay`, as in '3', '3,5' or '2-4'."
        " '': none", form=lambda text: texts.parse_steps(text, "trainer.replay_steps"))
