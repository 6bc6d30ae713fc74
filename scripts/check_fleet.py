"""Lets servers join, leave, die and hang in the middle of a training, and checks that results do not change.

    python scripts/check_fleet.py [--out DIR]

A small task is trained twice: with one vLLM server of its own, and with four of `jppo.serve`, which the training looks
up in a file while they come and go. Samples, metrics and the exported weights must be the same to the bit, and the
servers must give one answer labelled with the step's version for each sample. Prints a table; exits with 1 where
something was lost. Some five minutes on two cores.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import check_faults
import check_rollouts

from jppo import train
from jppo.rollout.servers import guard
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.vllm import publish
from jppo.samples.queue import SampleQueue

LIMIT_S = 300.0  # for one event
SETTINGS = check_rollouts.SETTINGS | {"rollout.servers": 1, "rollout.kv_cache_memory_bytes": 1 << 26}


class Servers:
    """The processes of `jppo.serve`."""

    def __init__(self, options: list[str], file: pathlib.Path, count: int):
        with contextlib.ExitStack() as held:
            free = [held.enter_context(socket.socket()) for _ in range(count)]
            for listener in free:
                listener.bind(("127.0.0.1", 0))
            self.ports = [listener.getsockname()[1] for listener in free]
        self.urls = [f"http://127.0.0.1:{port}" for port in self.ports]
        self._options, self._file = options, file
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *numbers: int) -> None:
        """Starts servers."""
        for i in numbers:
            place = [f"--config.rollout.port={self.ports[i]}", f"--listed={self._file}", f"--address={self.urls[i]}"]
            with self._file.with_name(f"server-{i}.log").open("ab") as log:
                command = [sys.executable, "-m", "jppo.serve", *self._options, *place]
                self._processes[i] = subprocess.Popen(command, cwd=check_faults.ROOT, stdout=log, stderr=log)

    def signal(self, i: int, number: int, *, child: bool = False) -> None:
        """Sends a signal to `jppo.serve` or to the vLLM that it runs."""
        pid = self._processes[i].pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[0]) if child else pid, number)

    def end(self) -> None:
        """Ends all servers."""
        for process in self._processes.values():
            process.kill()
            process.wait()


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happens in a step; the step goes on when exactly the servers `then` are in use."""

    step: int
    moment: str
    name: str
    do: Callable[[Servers], None]
    then: set[int]


EVENTS = (
    Event(1, "generation", "two servers", lambda _: None, {0, 1}),
    Event(2, "generation", "two more join", lambda s: s.start(2, 3), {0, 1, 2, 3}),
    Event(4, "generation", "SIGTERM to a server", lambda s: s.signal(0, signal.SIGTERM), {1, 2, 3}),
    Event(5, "generation", "kill -9 of another", lambda s: s.signal(1, signal.SIGKILL), {2, 3}),
    Event(6, "publish", "it is started again", lambda s: s.start(1), {1, 2, 3}),
    Event(7, "generation", "SIGSTOP of a third", lambda s: s.signal(2, signal.SIGSTOP, child=True), {1, 3}),
    Event(8, "generation", "SIGCONT", lambda s: s.signal(2, signal.SIGCONT, child=True), {1, 2, 3}),
)
STEPS = 9


def disturb(servers: Servers) -> dict[int, collections.Counter[str]]:
    """Injects the events into the training of this process; returns the answers of each step by server and version."""
    fleet: list[Fleet] = []
    answers: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    now, asked = [0], [0]

    def happen(moment: str) -> None:
        for event in EVENTS:
            if (event.step, event.moment) == (now[0], moment):
                began, wanted, in_use = time.monotonic(), {servers.urls[i] for i in event.then}, set()
                event.do(servers)
                while wanted != in_use:
                    if time.monotonic() - began > LIMIT_S:
                        raise RuntimeError(f"{event.name}: the servers in use are {in_use}, not {wanted}")
                    time.sleep(0.1)
                    in_use = {member.endpoint.url for member in fleet[0].members if member.up}
                print(f"step {event.step}: {event.name}, after {time.monotonic() - began:.1f} s", flush=True)

    ask_one, take, whole = Fleet._ask_one, SampleQueue.take, publish.FilePublisher.whole

    async def broken_ask_one(self: Fleet, *args: Any, **options: Any) -> Any:
        asked[0] += 1
        if asked[0] == check_rollouts.SENT:  # the requests before and after it are in flight meanwhile
            await asyncio.to_thread(happen, "generation")
        part = await ask_one(self, *args, **options)
        answers[now[0]].update(f"{servers.urls.index(part.server)} by {version}" for version in set(part.version))
        return part

    def broken_take(self: Any, step: int) -> Any:
        fleet[:] = [self._sampler]
        now[0], asked[0] = step + 1, 0
        return take(self, step)

    def broken_whole(self: Any, tensors: Any, version: int) -> Any:
        happen("publish")
        return whole(self, tensors, version)

    Fleet._ask_one, SampleQueue.take = broken_ask_one, broken_take  # type: ignore[method-assign]
    publish.FilePublisher.whole = broken_whole  # type: ignore[method-assign]
    return answers


def inside(folder: pathlib.Path, options: list[str]) -> None:
    """Runs the disturbed training in this process."""
    file = folder / "servers.txt"
    file.touch()
    servers = Servers(options, file, 4)
    answers = disturb(servers)
    try:
        servers.start(0, 1)
        train.main([*options, f"--config.rollout.urls=file:{file}"])
    finally:
        servers.end()
        (folder / "answers.json").write_text(json.dumps(answers))


def samples(run: pathlib.Path, step: int) -> list[str]:
    """Returns the lines of a step's samples."""
    return (run / f"samples/step_{step}.jsonl").read_text().splitlines()


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="the folder of the runs; default: a temporary one")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        out = args.out or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = check_faults.make_task(out / "task") | SETTINGS | {"trainer.total_training_steps": STEPS}
        check_faults.to_the_end(settings, out / "calm")
        folder = out / "fleet"
        folder.mkdir()
        given = [f"--config.{name}={value}" for name, value in (settings | {"trainer.run_dir": folder / "run"}).items()]
        command = [__file__, "--inside", str(folder), f"--config={check_faults.ROOT / 'configs/quickstart.py'}:{out}"]
        env = os.environ | {guard.TOKEN: guard.new_key().token}
        subprocess.run([sys.executable, *command, *given], env=env, check=True)
        calm, lines = check_rollouts.lines(out / "calm"), check_rollouts.lines(folder / "run")
        counted = {line["step"]: line for line in check_faults.outcome(folder / "run")["metrics"]}
        answers = json.loads((folder / "answers.json").read_text())
        kept = check_faults.outcome(out / "calm")["files"] == check_faults.outcome(folder / "run")["files"]
        print("| step | event | answers of each server | repeated requests | same samples and metrics, right version |")
        print("|---|---|---|---:|---|")
        for step in range(1, STEPS + 1):
            shares = [answers[str(step)].get(f"{i} by {step - 1}", 0) for i in range(4)]  # later ones are of checks
            right = sum(shares) == len(samples(out / "calm", step)) and lines[step] == calm[step]
            right &= samples(out / "calm", step) == samples(folder / "run", step)
            happened = ", ".join(f"{event.name} ({event.moment})" for event in EVENTS if event.step == step)
            again = counted[step]["rollout/asked_again"]
            cells = [step, happened, " + ".join(map(str, shares)), f"{again:.0f}", "yes" if right else "**no**"]
            print(f"| {' | '.join(map(str, cells))} |")
            kept &= right
    print(f"all samples and the exported weights are {'the same to the bit' if kept else 'NOT the same'}")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(pathlib.Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
