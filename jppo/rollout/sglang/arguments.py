"""The start command, options and environment of SGLang servers for training."""

import os
import subprocess

from jppo import interpreter
from jppo.rollout.servers.process import ServerProgram
from jppo.rollout.vllm.arguments import ServerSettings, devices, engine_args, make_program, triton
from jppo.settings import UserError

MODULE = "jppo.rollout.sglang.guarded"
ROOM = 2  # tokens of its context that SGLang never fills

# Options that engine_args may not set, and the settings that do.
OURS = {
    **dict.fromkeys(("--model-path", "--model", "--served-model-name", "--host", "--load-format"), "jppo"),
    **dict.fromkeys(("--enable-deterministic-inference", "--weight-version", "--skip-tokenizer-init"), "jppo"),
    "--port": "rollout.port",
    "--enable-memory-saver": "rollout.sleep_level",
    "--dtype": "rollout.dtype",
    "--context-length": "data.max_prompt_length and data.max_response_length",
    "--max-running-requests": "rollout.max_num_seqs",
    "--disable-cuda-graph": "rollout.enforce_eager",
    "--mem-fraction-static": "rollout.gpu_memory_utilization",
    **dict.fromkeys(("--tp-size", "--tensor-parallel-size", "--tp"), "rollout.tensor_model_parallel_size"),
}

# Run in the server's interpreter without importing SGLang, which would take seconds.
_PROBE = """
import importlib.metadata, importlib.util
print(importlib.metadata.version("sglang") if importlib.util.find_spec("sglang") else "")
"""


def check_sglang(python: str) -> str:
    """Returns the version of the interpreter's SGLang; UserError if it has none."""
    executable = interpreter.executable(python)
    probe = subprocess.run([executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=120)
    if probe.returncode != 0:
        raise UserError(f"rollout.python={executable} does not run: {probe.stderr.strip()[-300:]}")
    if not probe.stdout.strip():
        raise UserError(
            f"SGLang is not installed for {executable}; run `{executable} -m pip install sglang`, in a separate"
            " environment, or set rollout.python to an interpreter that has it"
        )
    return probe.stdout.strip()


def flags(settings: ServerSettings) -> list[str]:
    """Returns the options that make its tokens, log-probs and weights match the trainer's."""
    always = [
        "--enable-deterministic-inference",  # required for seeds
        *("--load-format", "dummy"),  # the trainer is the only source of weights
        *("--dtype", settings.dtype),
        *("--context-length", str(settings.max_model_len + ROOM)),
        *("--max-running-requests", str(settings.max_num_seqs)),
        *("--mem-fraction-static", str(settings.gpu_memory_utilization)),
        *("--tp-size", str(settings.tensor_model_parallel_size)),
    ]
    if settings.enforce_eager:
        always.append("--disable-cuda-graph")
    if settings.sleeps:
        always.append("--enable-memory-saver")
    return [*always, *engine_args(settings.engine_args, OURS)]


def environment(settings: ServerSettings) -> dict[str, str]:
    """Returns SGLang's additional environment variables."""
    return {
        "PYTHONPATH": interpreter.python_path(),
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise a paused server is unhealthy
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # for the tokens of ROOM, which never occur
        "HF_HUB_OFFLINE": "1",
        **triton(settings.dtype),
    }


def program(index: int, *, model_dir: str, run_dir: str, settings: ServerSettings, folder: str) -> ServerProgram:
    """Returns the SGLang program number `index` of a run."""
    env = {**os.environ, **environment(settings), **devices(index, settings)}
    env.pop("SGLANG_RETURN_ORIGINAL_LOGPROB", None)  # log-probs must be at the sampling temperature
    start = [MODULE, "--model-path", model_dir]
    return make_program(index, start, flags(settings), env, run_dir=run_dir, settings=settings, folder=folder)
