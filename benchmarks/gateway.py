"""The gateway's share of the time, with many agents at once and an engine that takes seconds for an answer.

    python benchmarks/gateway.py --tokenizer=QWEN2.5 [--agents 256] [--profile]

Every agent is a process that sends TURNS chats, each with the history so far. The engine answers with TOKENS tokens
after SECONDS. The share is the processor time of the gateway's thread over the time of all episodes. --profile prints
where the thread spends it, which takes longer.
"""

import argparse
import asyncio
import cProfile
import pathlib
import pstats
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from machine import ROOT, begin, write

from jppo import settings
from jppo.agent.make import make_gateway
from jppo.data.tokenizer import load_tokenizer
from jppo.rollout.protocol import Answer, greedy
from jppo.types import Prompt, Sampling

TURNS, TOKENS, SECONDS = 4, 200, 5.0
AGENT = f"""
import http.client, json, os

def agent(task):
    host = os.environ["OPENAI_BASE_URL"].split("/")[2]
    head = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    look = {{"name": "look", "parameters": {{"type": "object", "properties": {{}}}}}}
    tools = [{{"type": "function", "function": look}}]
    line, messages = http.client.HTTPConnection(host, timeout=600), list(task["prompt"])
    for _ in range({TURNS}):
        body = json.dumps({{"model": "policy", "messages": messages, "tools": tools}})
        line.request("POST", "/v1/chat/completions", body, head)
        messages.append(json.load(line.getresponse())["choices"][0]["message"])
        messages.append({{"role": "user", "content": "Go on."}})
    return {{"reward": 1.0}}
"""


def measure(tokenizer: Any, agent: str, agents: int, profile: bool) -> dict[str, Any]:
    """Runs one episode per agent, all at once."""
    c = settings.default()
    c.rollout.agent, c.rollout.agent_concurrency, c.rollout.agent_reward = agent, agents, "reported"
    c.model.path = c.data.train_files = c.data.val_files = "unused"  # a run needs them
    gateway = make_gateway(settings.typed(c), tokenizer, (tokenizer.eos_token_id,))
    rng = np.random.default_rng(0)
    text = rng.integers(300, 20_000, (agents * TURNS, TOKENS - 1)).tolist()
    profiler = cProfile.Profile(time.thread_time)

    async def ask(ids: Sequence[int], *, sampling: Sampling, seed: int, near: Any) -> Answer:
        tokens = [*text.pop(), tokenizer.eos_token_id]
        await asyncio.sleep(SECONDS)
        return Answer(tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop")

    async def all_of_them() -> tuple[float, float, int]:
        messages = [{"role": "user", "content": "Look around."}]
        prompt = Prompt("p", "x", messages, np.arange(9, dtype=np.int32), "", {})
        options = dict(sampling=greedy(4096), seed=0, near=0)
        loop = gateway._start_loop()
        if profile:
            loop.call_soon_threadsafe(profiler.enable)
        [thread] = [one.ident for one in threading.enumerate() if one.name == "jppo-gateway"]
        clock = time.pthread_getcpuclockid(thread)
        began, used = time.monotonic(), time.clock_gettime(clock)
        talks = await asyncio.gather(*(gateway.talk(ask, prompt, **options) for _ in range(agents)))
        used, took = time.clock_gettime(clock) - used, time.monotonic() - began
        if profile:
            loop.call_soon_threadsafe(profiler.disable)
            await asyncio.sleep(0.1)
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        return took, used, sum(t.exchange is None or t.exchange.fault is not None or t.turns != TURNS for t in talks)

    try:
        took, used, failed = asyncio.run(all_of_them())
    finally:
        gateway.close()
    each = used / (agents * TURNS)
    return {
        "agents": agents,
        "seconds": took,
        "thread_s": used,
        "ms_per_request": 1e3 * each,
        "share": used / took,
        "failed": failed,
    }


def table(result: dict[str, Any]) -> str:
    """The measurements in Markdown."""
    lines = ["| agents | seconds | processor ms per request | share | failed |", "|---:|---:|---:|---:|---:|"]
    for row in result["measured"]:
        agents, took, used = row["agents"], row["seconds"], row["thread_s"]
        each = 1e3 * used / (agents * TURNS)
        lines.append(f"| {agents} | {took:.1f} | {each:.2f} | {used / took:.1%} | {row['failed']} |")
    return "\n".join(lines)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="folder of a tokenizer with a chat template")
    parser.add_argument("--agents", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benchmarks/results")
    args = parser.parse_args()
    result, tokenizer = begin(), load_tokenizer(args.tokenizer)
    about = {"commit": result.pop("commit"), "load_average": result.pop("load_average")}
    with tempfile.TemporaryDirectory() as folder:
        agent = pathlib.Path(folder, "agent.py")
        agent.write_text(AGENT)
        measured = [measure(tokenizer, f"{agent}:agent", count, args.profile) for count in args.agents]
    result["measured"] = [about | row for row in measured]
    write(result, table, args.out, "gateway")


if __name__ == "__main__":
    main()
