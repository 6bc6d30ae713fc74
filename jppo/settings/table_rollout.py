"""Settings of the rollout: the engine, its servers, sampling, publishing, conversations, tests."""

from jppo.settings import texts
from jppo.settings.parts import ENGINES
from jppo.settings.setting import Setting as S

_SERVERS, _ASYNC, _SENT = "rollout.name!=inprocess", "rollout.mode=async", "rollout.publish_via!=file"
_TURNS, _TOOLS = "rollout.multi_turn.enable", "rollout.multi_turn.tool_config_path"
_AGENT, _FORMATS = "rollout.agent", ("hermes", "openai", "qwen3", "qwen3_coder", "plain")

MULTI_TURN = (
    S("enable", False, "Conversations of several turns, with tools, a simulated user or an environment"),
    S("max_assistant_turns", -1, "Turns of the policy. -1: until the response is full", bounds="[1,", off=-1,
      only=_TURNS),
    S("max_user_turns", -1, "Turns of tools, users and environments. -1: any number", bounds="[1,", off=-1,
      only=_TURNS),
    S("max_parallel_calls", 1, "Tool calls of one turn that are answered", bounds="[1,", only=_TOOLS),
    S("max_tool_response_length", 256, "Longest answer of a tool", unit="characters", bounds="[1,", only=_TOOLS),
    S("tool_response_truncate_side", "middle", "Part of a longer answer that is cut",
      choices=("left", "middle", "right"), only=_TOOLS),
    S("tool_config_path", "", "Tools: a YAML file, or a Python file with tools()", only=_TURNS),
    S("tool_timeout_s", 10.0, "Time limit of a tool call, and of an answer of a user or an environment",
      unit="seconds", bounds="(0,", only=_TURNS),
    S("format", "hermes", "Syntax of tool calls. openai and qwen3: as hermes; plain: for models without a chat"
      " template",
      choices=_FORMATS, only=_TURNS),
    S("interaction", "", "User-defined simulated user, PATH.py:CLASS or MODULE:CLASS", only=_TURNS),
    S("environment", "", "User-defined environment, PATH.py:CLASS or MODULE:CLASS; its reward is the response's",
      only=_TURNS),
    S("allow_code", False, "Permission for tools that run what the model writes", only=_TOOLS),
)  # fmt: skip

VAL_KWARGS = (
    S("temperature", 0.0, "Temperature of a test. 0.0: greedy", bounds="[0,"),
    S("top_p", 1.0, "Nucleus of a test. 1.0: all tokens", bounds="(0, 1]"),
    S("top_k", -1, "Likeliest tokens of a test that are kept. -1: all", bounds="[1,", off=-1),
    S("min_p", 0.0, "Least probability in a test, relative to the likeliest token. 0.0: none", bounds="[0, 1)"),
    S("n", 1, "Responses to each prompt of a test", bounds="[1,"),
)

ROLLOUT = (
    S("name", "vllm", "Rollout engine. vllm and sglang are servers; inprocess samples on the trainer's devices",
      choices=ENGINES),
    S("python", "", "Python interpreter with vLLM or SGLang. '': the trainer's", only=_SERVERS),
    S("urls", "", "Addresses of running servers, separated by commas. file:PATH or dns://NAME:PORT: looked up again"
      " during the run, as servers join and leave. '': servers are started", only=_SERVERS),
    S("servers", 1, "Number of servers to start", bounds="[1,", only=_SERVERS),
    S("port", 0, "Port of the first server; the others follow. 0: free ports", bounds="[0,", only=_SERVERS),
    S("mode", "sync", "Order of sampling and learning. async: the samples of the next steps are generated while the"
      " trainer learns", choices=("sync", "async")),
    S("max_staleness", 1, "Largest age of a sample's weights", unit="updates", bounds="[0,", only=_ASYNC),
    S("on_update", "wait", "Treatment of running requests at an update. wait: until they finish; abort: stop and"
      " resume; keep: continue under the new weights", choices=("wait", "abort", "keep"), only=_ASYNC),
    S("partial", False, "Continuation of long responses in the next steps", only=_ASYNC),
    S("n", 1, "Responses to each prompt", bounds="[1,"),
    S("temperature", 1.0, "Sampling temperature; log-probs are computed at it too", bounds="[0,"),
    S("top_p", 1.0, "Nucleus of sampling; the trainer's log-probs do not apply top_p, top_k and min_p. 1.0: all"
      " tokens", bounds="(0, 1]"),
    S("top_k", -1, "Likeliest tokens that are kept. -1: all", bounds="[1,", off=-1),
    S("min_p", 0.0, "Least probability relative to the likeliest token. 0.0: none", bounds="[0, 1)"),
    S("stop", "", r"Texts that end a response, separated by commas; \n, \t, \r, \, and \\ are escapes",
      form=texts.stop_texts),
    S("ignore_eos", False, "End of a response by stop texts and length alone"),
    S("routing_replay", False, "Routing replay: log-probs and updates use the experts that the rollout engine chose"),
    S("dtype", "float32", "Dtype of the engine's weights and products", choices=("float32", "bfloat16", "float16")),
    S("enforce_eager", True, "vLLM without CUDA graphs: starts sooner and samples more slowly on a GPU"),
    S("sleep_level", 0, "Sleep of servers on the trainer's GPU while it learns. 0: none; 1 and 2: vLLM's levels",
      choices=(0, 1, 2), only=_SERVERS),
    S("max_num_seqs", 256, "Concurrent responses of a server", bounds="[1,"),
    S("max_concurrent_requests", -1, "Requests in flight at a server, which queues those over max_num_seqs. -1:"
      " max_num_seqs, at least 256", bounds="[1,", off=-1, only=_SERVERS),
    S("gpu_memory_utilization", 0.4, "Fraction of a GPU's memory for a server", bounds="(0, 1]", only=_SERVERS),
    S("kv_cache_memory_bytes", 268435456, "KV cache on a CPU", unit="bytes", bounds="(0,"),
    S("omp_threads", 1, "Threads of a server on a CPU", bounds="[1,", only=_SERVERS),
    S("tensor_model_parallel_size", 1, "GPUs of one server", bounds="[1,", only=_SERVERS),
    S("devices", "", "GPUs of the servers, as in CUDA_VISIBLE_DEVICES. '': all", only=_SERVERS),
    S("engine_args", "", "Further options of the server's command line", only=_SERVERS),
    S("start_timeout_s", 300.0, "Time limit of a server's start", unit="seconds", bounds="(0,", only=_SERVERS),
    S("request_timeout_s", 600.0, "Time in which a server must answer one of its requests", unit="seconds",
      bounds="(0,", only=_SERVERS),
    S("health_timeout_s", 60.0, "Time without a health reply before a server counts as hung", unit="seconds",
      bounds="(0,", only=_SERVERS),
    S("max_restarts", 5, "Restarts of broken servers, in all; then the run ends with a checkpoint", bounds="[0,",
      only=_SERVERS),
    S("lora_sync", "merge", "Publish of adapters. merge: merged into whole weights; adapter: adapters alone (vLLM)",
      choices=("merge", "adapter")),
    S("publish_via", "file", "Transport of the weights. file: on this machine; tcp: buckets over a socket, to any"
      " machine; nccl: to other GPUs; ipc: to servers on the trainer's GPUs (both not yet run on hardware); auto: file"
      " or tcp, by the servers' addresses",
      choices=("file", "tcp", "nccl", "ipc", "auto"), only=_SERVERS),
    S("publish_host", "", "Address of the trainer as the servers see it. '': they are on this machine", only=_SENT),
    S("publish_dir", "", "Folder of published weights, for servers in a container. '': nameless shared memory",
      only=_SERVERS),
    S("logp_tolerance", 1e-3, "Largest log-prob mismatch between trainer and rollout: of a token before step 1. The"
      " mean of a server's tokens after each publish may be a quarter of it", unit="nats", bounds="[0,"),
    S("agent", "", "Agent program that asks the policy through OpenAI's or Anthropic's API, one process per sample: a"
      " command line, or PATH.py:FUNCTION. '': none"),
    S("agent_reward", "graders", "Reward of an agent's episode. graders: as without one; exit: 1 for exit code 0, 0 for"
      " 1; reported: by the agent", choices=("graders", "exit", "reported"), only=_AGENT),
    S("agent_format", "hermes", "Syntax of the policy's tool calls, as rollout.multi_turn.format", choices=_FORMATS,
      only=_AGENT),
    S("agent_timeout_s", 600.0, "Time limit of an episode; its processes are then killed and its sample is left out",
      unit="seconds", bounds="(0,", only=_AGENT),
    S("agent_concurrency", 256, "Agent programs that run at once on a host", bounds="[1,", only=_AGENT),
    S("agent_branches", 4, "Trajectories of a conversation or an agent's episode that are trained on; a changed history"
      " begins a new one", bounds="[1,"),
    S("history", "template", "Earlier turns of the policy in a conversation. template: as the chat template renders"
      " them, in a new trajectory where it changes them; sampled: as they were sampled",
      choices=("template", "sampled")),
    S("max_kl_jump", 1.0, "Largest rise of rollout_corr/kl in a step; a larger one stops the run. 0.0: no limit",
      unit="nats", bounds="[0,"),
)  # fmt: skip
