"""Serves a trained model by vLLM, with OpenAI's API: python -m jppo.serve DIR

    python -m jppo.serve runs/quickstart --port 8000
    JPPO_SERVER_TOKEN=... python -m jppo.serve --config=configs/gsm8k.py --config.rollout.port=8000 --host=0.0.0.0

DIR is the folder of a run, a model's directory or a hub name; it is also the model's name in requests. Further options
are vLLM's. With --config it runs one server for a training elsewhere instead, which attaches by rollout.urls. Config,
overrides and the token are the training's, and the server has random weights until the training publishes its own.
--listed adds its address to a file for rollout.urls=file:PATH when it answers, and removes it when it ends; --address
is the address if not the host's name. SIGTERM ends the server.
"""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from jppo import child_process, settings
from jppo.errors import UserError, expanded
from jppo.models import hf
from jppo.rollout.protocol import RolloutError
from jppo.rollout.servers import guard
from jppo.rollout.servers.endpoint import Endpoint
from jppo.rollout.servers.launch import die_with_parent
from jppo.rollout.servers.make import server_settings
from jppo.rollout.servers.member import HOST
from jppo.rollout.vllm import arguments
from jppo.runlog import durable_files
from jppo.settings import Settings

POLL_S = 0.5


@settings.exit_on_user_error
def main(argv: list[str] | None = None) -> None:
    """Serves a trained model, if the first argument is no option; otherwise a server for a training elsewhere."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and not argv[0].startswith("-"):
        command = model_command(argv)
        print(f"jppo: starting {shlex.join(command)}", file=sys.stderr, flush=True)
        os.execve(command[0], command, {"VLLM_NO_USAGE_STATS": "1", **os.environ})
    if not any(word.startswith(("--config", "--help", "-h")) for word in argv):
        raise UserError(
            "name the model first, as in jppo serve DIR --port=8000; --config=FILE serves a training elsewhere"
        )
    serve_training(argv)


def model_command(argv: list[str]) -> list[str]:
    """Returns the command of a vLLM server of a model, with the options that are vLLM's."""
    parser = settings.Parser("jppo.serve", __doc__)
    parser.add_argument("model", metavar="DIR", help="the folder of a run, a model's directory or a hub name")
    parser.add_argument("--host", default=HOST, help="the address to listen on")
    parser.add_argument("--python", default="", help="the interpreter that has vLLM, as in rollout.python")
    args, options = parser.parse_known_args(argv)
    if wrong := [word for word in options if word.startswith("--config")]:
        raise UserError(f"{wrong[0]}: a model is served without a config; leave out {args.model} or the config")
    build = arguments.check_vllm(args.python, "--python")
    folder = hf.resolve_directory(hf.final_model(args.model), weights=True)
    model = ["--model", str(folder), "--served-model-name", args.model, "--host", args.host]
    executable = child_process.executable(args.python, "--python")
    return [executable, "-m", arguments.MODULE, *model, *(arguments.CPU_OPTIONS if build == "cpu" else ()), *options]


def serve_training(argv: list[str]) -> NoReturn:
    """Starts one vLLM server by the training's config, and exits with its code."""
    parser = settings.Parser("jppo.serve", __doc__)
    parser.add_argument("--host", default=HOST, help="the address to listen on")
    parser.add_argument("--listed", type=expanded, help="the file of addresses")
    parser.add_argument("--address", default="", help="the server's address in that file")
    args, rest = parser.parse_known_args(argv)
    config, _ = settings.parse(rest, __doc__ or "", settings.default())
    c = settings.typed(config, Settings)
    if c.rollout.name != "vllm" or not c.rollout.port:
        wanted = "set rollout.name=vllm and rollout.port"
        raise UserError(f"rollout.name={c.rollout.name!r}, rollout.port={c.rollout.port}: {wanted}")
    if not os.environ.get(guard.TOKEN, "").strip():
        raise UserError(f"{guard.TOKEN} is not set; set it to one random value here and for the training")
    server, port = dataclasses.replace(server_settings(c), publish_via="tcp"), c.rollout.port  # it takes files, too
    build = arguments.check_vllm(c.rollout.python)
    arguments.require_served(server, build)
    path = str(hf.resolve_directory(c.model.path, weights=False))
    model = ["--model", path, *arguments.model_options(path, c.trainer.run_dir)]
    address = ["--host", args.host, "--port", str(port), "--served-model-name", "policy"]
    command = [child_process.executable(c.rollout.python), "-m", arguments.MODULE, *model, *address]
    env = {**os.environ, **arguments.vllm_environment(server, build)}
    sys.exit(
        run_server(
            [*command, *arguments.vllm_options(server, build)],
            env,
            address=args.address or f"http://{socket.gethostname()}:{port}",
            local=own_address(args.host, port),
            file=args.listed,
        )
    )


def own_address(host: str, port: int) -> str:
    """Returns the address at which this machine reaches a server that listens on `host`."""
    host = HOST if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run_server(command: list[str], env: dict[str, str], *, address: str, local: str, file: pathlib.Path | None) -> int:
    """Runs the server until it ends or SIGTERM comes; returns its exit code. It is listed while it answers."""
    if file is not None:
        try:
            _remove_address(file, address)  # of a server that was killed
        except (OSError, UnicodeDecodeError) as e:
            raise UserError(f"--listed={file}: {e}; name a text file in a folder that can be written") from e
    child = subprocess.Popen(command, env=env, start_new_session=True, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: _signal_group(child.pid, signal.SIGTERM))
    endpoint = Endpoint(local, timeout_s=5.0, explain=str, key=guard.Key(env[guard.TOKEN].strip()))
    try:
        while file is not None and child.poll() is None:
            with contextlib.suppress(RolloutError):
                endpoint.check("/health")
                _change_lines(file, lambda lines: [*(line for line in lines if line != address), address])
                print(f"{address} is listed in {file}", flush=True)
                break
            time.sleep(POLL_S)
        return child.wait()
    finally:
        _signal_group(child.pid, signal.SIGKILL)
        if file is not None:
            _remove_address(file, address)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _remove_address(file: pathlib.Path, address: str) -> None:
    _change_lines(file, lambda lines: [line for line in lines if line != address])


def _change_lines(file: pathlib.Path, change: Callable[[list[str]], list[str]]) -> None:
    """Rewrites the lines of a file under a lock that other servers take, too."""
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        old_lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        new_lines = change(old_lines)
        if new_lines != old_lines:
            durable_files.write_text(file, "".join(f"{line}\n" for line in new_lines))


if __name__ == "__main__":
    main()
