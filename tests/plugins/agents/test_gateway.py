"""Agent programs against the gateway: what they get, what the engine is asked, and what is trained on."""

import asyncio
import dataclasses
import functools
import json
import pathlib
import shutil
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

from jppo.data.tokenizer import decode, pieces
from jppo.plugins.agents import turn_tokens
from jppo.plugins.agents.calls import PARSERS
from jppo.plugins.agents.gateway.episode import Language, Rules
from jppo.plugins.agents.gateway.gateway import Gateway
from jppo.rollout.protocol import Answer, RolloutError, greedy

CALCULATOR = {
    "type": "function",
    "function": {"name": "calculator", "description": "", "parameters": {"type": "object", "properties": {"x": {}}}},
}


def language(hall):
    @functools.cache
    def chat(schemas):
        if hall.format == "plain":
            return turn_tokens.plain_chat(hall.tokenizer)
        how = dict(roles=["user"], name=hall.format, parse=PARSERS[hall.format], **hall.how)
        return turn_tokens.template_chat(hall.tokenizer, json.loads(schemas), **how)

    return Language(
        chat=chat,
        parse=PARSERS[hall.format],
        format=hall.format,
        decode=lambda ids: decode(hall.tokenizer, ids),
        spell=hall.tokenizer.decode,
        pieces=lambda ids: pieces(hall.tokenizer, ids),
        ends=(hall.tokenizer.eos_token_id,),
        longest=10**6,
    )


def answer_of(tokens, finish="stop"):
    return Answer(tokens, [-0.5] * len(tokens), [3] * len(tokens), finish)


RULES = Rules(max_prompt_length=500, branches=4, reward="reported", timeout_s=120.0)


@pytest.fixture
def run(tmp_path):
    """Runs episodes of a Python program, or of a command, against an engine."""

    def go(hall, program, ask, *, room=2000, count=1, concurrency=64, prompt=None, experts=False, kept=0, **rules):
        if "\n" in program:
            path = tmp_path / "agent.py"
            path.write_text(textwrap.dedent(program))
            program = f"{sys.executable} {path}" if "def agent" not in program else f"{path}:agent"
        limits = dataclasses.replace(RULES, **rules)
        gateway = Gateway(program, language(hall), limits, concurrency=concurrency)
        sampling = dataclasses.replace(greedy(room), temperature=1.0, experts=experts, kept=kept)

        async def all_of_them():
            asked = hall.prompt() if prompt is None else prompt
            talks = [gateway.talk(ask, asked, sampling=sampling, seed=i, near=0) for i in range(count)]
            return await asyncio.gather(*talks)

        try:
            found = asyncio.run(all_of_them())
        finally:
            gateway.close()
        return found[0] if count == 1 else found

    return go


def spans(t):
    """The sampled stretches of a trajectory."""
    edges = np.flatnonzero(np.diff(t.sampled, prepend=False, append=False))
    return [t.tokens[a:b].tolist() for a, b in zip(edges[::2], edges[1::2], strict=True)]


OPENAI = """
    import json, sys, openai
    client, task = openai.OpenAI(), json.load(sys.stdin)
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object",
              "properties": {"expression": {"type": "string"}}}}}]
    messages = list(task["prompt"])
    for turn in range(5):
        said = client.chat.completions.create(model="policy", messages=messages, tools=tools).choices[0]
        messages.append(said.message)
        if not said.message.tool_calls:
            break
        for call in said.message.tool_calls:
            value = str(eval(json.loads(call.function.arguments)["expression"]))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": value})
    print(json.dumps({"reward": float(task["ground_truth"] in said.message.content)}))
"""
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*34"}}\n</tool_call>'


def test_an_agent_with_openais_client_and_tools(hermes, run):
    ask = hermes.policy(f"Let me see. {CALL}", "It is 408.")
    t = run(hermes, OPENAI, ask)
    first, second = ask.answers
    assert spans(t) == [first, second] and t.exchange.fault is None
    assert (t.exchange.score, t.exchange.calls, t.turns, t.branches) == (1.0, 1, 2, ())
    assert ask.asked[1][: len(ask.asked[0]) + len(first)] == ask.asked[0] + first  # what was sampled, not its text
    given = hermes.tokenizer.decode(ask.asked[1][len(ask.asked[0]) + len(first) :])
    assert given == "\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert t.logprob[t.sampled][0] == np.float32(-1.0) and (t.version[t.sampled] == 7).all()
    assert "calculator" in hermes.tokenizer.decode(ask.asked[0])  # the template shows the tool


def test_a_function_runs_in_forks_of_one_process(hermes, run):
    program = """
    import os, openai
    PARENT = os.getpid()

    async def agent(task):
        print("some output")
        async with openai.AsyncOpenAI() as client:
            messages = [{"role": "user", "content": f"{os.getpid()} {PARENT}"}]
            await client.chat.completions.create(model="policy", messages=messages)
        return {"reward": 0.5}
    """
    end = [hermes.tokenizer.eos_token_id]

    async def ask(ids, **how):
        return answer_of(hermes.encode("yes") + end)

    asked = run(hermes, program, ask, count=6)
    said = [hermes.tokenizer.decode(t.tokens[: int(np.argmax(t.sampled))]).split("user\n")[1] for t in asked]
    own, parents = zip(*(text.split("<")[0].split() for text in said), strict=True)
    assert len(set(own)) == 6 and len(set(parents)) == 1 and not set(own) & set(parents)
    assert [t.exchange.score for t in asked] == [0.5] * 6 and [t.exchange.fault for t in asked] == [None] * 6


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_with_anthropics_client_and_tools(hermes, run, stream):
    program = f"""
    import json, sys, anthropic
    client, task = anthropic.Anthropic(), json.load(sys.stdin)
    tools = [{{"name": "calculator", "description": "d", "input_schema": {{"type": "object", "properties": {{}}}}}}]
    messages = list(task["prompt"])
    how = dict(model="policy", max_tokens=100, system="Be exact.", tools=tools)
    while True:
        if {stream}:
            with client.messages.stream(messages=messages, **how) as parts:
                said = parts.get_final_message()
        else:
            said = client.messages.create(messages=messages, **how)
        messages.append({{"role": "assistant", "content": said.content}})
        calls = [block for block in said.content if block.type == "tool_use"]
        if not calls:
            break
        assert said.stop_reason == "tool_use" and calls[0].input == {{"expression": "12*34"}}, said
        content = [{{"type": "text", "text": "408"}}]
        results = [{{"type": "tool_result", "tool_use_id": c.id, "content": content}} for c in calls]
        messages.append({{"role": "user", "content": results}})
    assert said.stop_reason == "end_turn" and said.usage.output_tokens == {len(hermes.encode("It is 408.")) + 1}, said
    print(json.dumps({{"reward": float(said.content[0].text == "It is 408.")}}))
    """
    ask = hermes.policy(f"Let me see. {CALL}", "It is 408.")
    t = run(hermes, program, ask)
    assert t.exchange.fault is None and t.exchange.score == 1.0 and t.branches == ()
    assert spans(t) == ask.answers and "Be exact." in hermes.tokenizer.decode(ask.asked[0])
    assert ask.asked[1][: len(ask.asked[0]) + len(ask.answers[0])] == ask.asked[0] + ask.answers[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_an_agent_with_openais_responses(hermes, run, stream, stored):
    program = f"""
    import json, sys, openai
    client, task = openai.OpenAI(), json.load(sys.stdin)
    tools = [{{"type": "function", "name": "calculator", "parameters": {{"type": "object", "properties": {{}}}}}}]

    def ask(**how):
        how = dict(model="policy", instructions="Be exact.", tools=tools, **how)
        if {stream}:
            with client.responses.stream(**how) as parts:
                return parts.get_final_response()
        return client.responses.create(**how)

    items = list(task["prompt"])
    said = ask(input=items)
    (call,) = [item for item in said.output if item.type == "function_call"]
    assert said.output_text == "Let me see." and json.loads(call.arguments) == {{"expression": "12*34"}}
    result = {{"type": "function_call_output", "call_id": call.call_id, "output": "408"}}
    if {stored}:
        said = ask(input=[result], previous_response_id=said.id)
    else:
        said = ask(input=[*items, *said.output, result])
    assert said.status == "completed" and said.usage.output_tokens == {len(hermes.encode("It is 408.")) + 1}, said
    print(json.dumps({{"reward": float(said.output_text == "It is 408.")}}))
    """
    ask = hermes.policy(f"Let me see. {CALL}", "It is 408.")
    t = run(hermes, program, ask)
    assert t.exchange.fault is None and t.exchange.score == 1.0 and t.branches == ()
    assert spans(t) == ask.answers


def test_streams_several_answers_stop_texts_and_log_probs(hermes, run):
    program = """
    import json, openai
    client = openai.OpenAI()
    said = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], n=2,
                                          logprobs=True, stop=["END"], max_tokens=9)
    first, second = said.choices
    assert first.message.content == "one " and second.message.content == "two three", said
    assert [c.finish_reason for c in said.choices] == ["stop", "stop"] and said.usage.completion_tokens == 5, said
    assert "".join(t.token for t in second.logprobs.content).startswith("two three"), second
    assert second.logprobs.content[0].logprob == -2.0
    stream = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], stream=True,
                                            stream_options={"include_usage": True})
    parts = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == "four"
    assert parts[-1].usage.completion_tokens == 2 and parts[-2].choices[0].finish_reason == "stop"
    print(json.dumps({"reward": 1}))
    """
    ask = hermes.policy("one END", "two three", "four")
    ask.answers[0] = hermes.encode("one END")  # a stop text ends it, no end token
    t = run(hermes, program, ask)
    assert t.exchange.fault is None, t.exchange
    assert [spans(one) for one in (t, *t.branches)] == [[ask.answers[2]], [ask.answers[1]], [ask.answers[0]]]
    assert ask.room[0] == 9 and len({*ask.seeds}) == 3


def test_texts_are_continued_without_encoding_them_again(plain, run):
    program = """
    import json, sys, openai
    client, task = openai.OpenAI(), json.load(sys.stdin)
    text = task["prompt"]
    for more in ("[[408]]", ""):
        text += client.completions.create(model="policy", prompt=text, max_tokens=20).choices[0].text + more
    print(json.dumps({"reward": float(text.endswith("[[408]]408"))}))
    """
    ask = plain.policy("<<12*34>>", "408")
    t = run(plain, program, ask, prompt=plain.prompt("12*34="))
    assert t.exchange.fault is None and t.exchange.score == 1.0
    assert spans(t) == ask.answers and ask.asked[0] == plain.prompt("12*34=").ids.tolist()
    assert ask.asked[1] == ask.asked[0] + ask.answers[0] + plain.encode("[[408]]")


def test_a_token_has_the_experts_of_the_first_answer_that_read_it(plain, run):
    program = """
    import openai
    client = openai.OpenAI()
    text = "12*34="
    for more in ("[[408]]", ""):
        text += client.completions.create(model="policy", prompt=text).choices[0].text + more
    """
    ask = plain.policy("<<12*34>>", "408")
    t = run(plain, program, ask, prompt=plain.prompt("12*34="), reward="graders", experts=True, kept=2)
    first = len(ask.asked[0]) + len(ask.answers[0]) - 1
    read = np.repeat([1, 2, -1], [first, len(t.tokens) - first - 1, 1])  # nobody read the last token
    np.testing.assert_array_equal(t.experts, np.broadcast_to(read[:, None, None], (len(t.tokens), 2, 1)))
    turn = np.where(np.arange(len(t.tokens)) < len(ask.asked[1]), 1, 2)
    expected = np.where(t.sampled[:, None], np.stack([t.tokens, turn], axis=1), -1)
    np.testing.assert_array_equal(t.kept, expected)


REWRITES = """
import json, sys, openai
client = openai.OpenAI()
def say(messages):
    return client.chat.completions.create(model="policy", messages=messages).choices[0].message
start = [{"role": "user", "content": "hi"}]
first = say(start)
more = [*start, first, {"role": "user", "content": "go on"}]
say(more)
say([*start, {"role": "assistant", "content": "what I never said"}, {"role": "user", "content": "go on"}])
say([*start, first, {"role": "user", "content": "go back"}])
print(json.dumps({"reward": 2.0}))
"""


def test_a_history_that_is_rewritten_becomes_branches_with_one_reward(hermes, run):
    ask = hermes.policy("a", "b", "c", "d")
    t = run(hermes, REWRITES, ask)
    a, b, c, d = ask.answers
    assert [spans(one) for one in (t, *t.branches)] == [[a, d], [c], [b]]  # each sampled token is trained on once
    assert ask.asked[3][: len(ask.asked[0]) + len(a)] == ask.asked[0] + a == ask.asked[1][: len(ask.asked[0]) + len(a)]
    assert "what I never said" in hermes.tokenizer.decode(ask.asked[2])
    assert t.branches[1].tokens.tolist() == ask.asked[1] + b
    assert {one.exchange.score for one in (t, *t.branches)} == {2.0}
    fewer = run(hermes, REWRITES, hermes.policy("a", "b", "c", "d"), branches=1)
    assert fewer.branches == () and fewer.exchange.branches_left_out == 2


def test_rewards_by_turn_are_earned_where_they_were_posted(hermes, run):
    program = """
    import json, os, httpx, openai
    client = openai.OpenAI()
    key = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    def say(messages):
        return client.chat.completions.create(model="policy", messages=messages)
    def reward(**body):
        return httpx.post(f"{os.environ['OPENAI_BASE_URL']}/reward", content=json.dumps(body), headers=key).status_code
    assert [model.id for model in client.models.list()] == ["policy"]
    assert reward(reward=1.0) == 400  # before any answer
    start = [{"role": "user", "content": "hi"}]
    first = say(start)
    other = say(start)
    say([*start, first.choices[0].message, {"role": "user", "content": "go on"}])
    assert [reward(reward=x) for x in ("a", float("1e999"), None)] == [400] * 3
    assert reward(reward=0.5, id=first.id) == reward(reward=0.25) == reward(reward=-1, id=other.id) == 200
    """
    ask = hermes.policy("a b c", "d", "e f")
    t = run(hermes, program, ask, reward="graders")
    (other,) = t.branches
    first = int(np.argmax(t.sampled))
    place = len(ask.answers[0]) - 1
    assert t.exchange.earned == ((place, 0.5), (len(t.tokens) - 1 - first, 0.25)) and t.exchange.score == -0.25
    assert other.exchange.earned == ((len(ask.answers[1]) - 1, -1.0),)
    assert t.exchange.fault is None  # posted amounts add to the graders' score


SAY = """
import openai
openai.OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
"""
SAY_IN = "; ".join(SAY.split("\n")[1:-1])


@pytest.mark.parametrize(
    "program,rules,fault,score",
    [
        ("import sys\nsys.exit('no luck')", {}, "the agent exited with 1: no luck", 0.0),
        (f"{SAY}raise ValueError('odd')", {}, "the agent exited with 1: ValueError: odd", 0.0),
        (f"{SAY}import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {}, "the agent exited with -9", 0.0),
        ("import time\ntime.sleep(60)", {"timeout_s": 1.0}, "took longer than rollout.agent_timeout_s=1", 0.0),
        ("import os\nprint('{}')", {}, "the agent sent no request to the policy", 0.0),
        (f"{SAY}print('done')", {}, "no reward, as {\"reward\": NUMBER}; its last line is 'done'", 0.0),
        (f"{SAY}print('[' * 10**5)", {}, "reported no reward", 0.0),
        (f"{SAY}print('{{\"reward\": true}}\\n')", {}, None, 1.0),
        (f"{SAY}import sys\nsys.exit(1)", {"reward": "exit"}, None, 0.0),
        (f"def agent(task):\n {SAY_IN}\n exit(1)", {"reward": "exit"}, None, 0.0),
        (f"def agent(task):\n {SAY_IN}\n raise ValueError('odd')", {"reward": "exit"}, "with 70: ValueError: odd", 0.0),
        (SAY, {"reward": "exit"}, None, 1.0),
        (f"{SAY}import sys\nsys.exit(2)", {"reward": "exit"}, "the agent exited with 2", 0.0),
        (SAY, {"reward": "graders"}, None, 0.0),
    ],
)
def test_how_an_agent_ends_is_its_reward_or_the_reason_to_leave_it_out(hermes, run, program, rules, fault, score):
    t = run(hermes, f"\n{program}\n", hermes.policy("yes"), **rules)
    assert (t.exchange.fault is None) == (fault is None) and (fault or "") in (t.exchange.fault or "")
    assert t.exchange.score == score and t.sampled.any() == ("openai" in program)


DAEMON = """
import pathlib, subprocess, sys, time
orphan = "import os, sys; os.fork() and os._exit(0); print(os.getpid(), flush=True); os.execlp('sleep', 'sleep', '61')"
session = subprocess.Popen([sys.executable, "-c", orphan], start_new_session=True, stdout=subprocess.PIPE)
child = subprocess.Popen(["sleep", "61"])
pathlib.Path("{}").write_text(f"{{session.stdout.readline().decode().strip()}} {{child.pid}}")
{}
"""
# A client of MCP starts its server in a session of its own.
MCP = """
import asyncio, pathlib, sys, mcp, mcp.client.stdio
serve = "import os, pathlib, time; pathlib.Path('{0}.new').write_text(str(os.getpid())); "
serve += "os.rename('{0}.new', '{0}'); time.sleep(61)"
async def connect():
    how = mcp.StdioServerParameters(command=sys.executable, args=["-c", serve])
    async with mcp.client.stdio.stdio_client(how):
        while not pathlib.Path("{0}").exists():
            await asyncio.sleep(0.05)
        {1}
asyncio.run(connect())
"""


@pytest.mark.parametrize("form", ["command", "function"])
@pytest.mark.parametrize("end", ["import time; time.sleep(60)", "import os; os._exit(3)"])
@pytest.mark.parametrize("work", [DAEMON, MCP])
def test_no_process_of_an_episode_is_left(hermes, run, form, tmp_path, work, end):
    if work is MCP:
        pytest.importorskip("mcp")
    program = work.format(tmp_path / "children", end)
    if form == "function":
        program = "\ndef agent(task):\n" + textwrap.indent(program, "    ")
    limit = (20.0 if work is MCP else 6.0) if "sleep" in end else 120.0
    t = run(hermes, program, hermes.policy(), timeout_s=limit)
    assert ("took longer" if "sleep" in end else "exited with 3") in t.exchange.fault
    children = (tmp_path / "children").read_text().split()
    assert children and not any(running(pid) for pid in children)


def test_the_process_that_starts_agents_is_started_again(hermes, run, tmp_path):
    """One of twelve programs kills it: the others that run then cost their samples, later ones run."""
    program = f"""
    import os, pathlib, signal, time
    SERVER = os.getpid()
    def agent(task):
        here = pathlib.Path("{tmp_path}")
        try:
            (here / "first").mkdir()
        except FileExistsError:
            if not (here / "dead").exists():
                (here / f"child{{os.getpid()}}").touch()
                time.sleep(60)
            {SAY_IN}
            return {{"reward": 1}}
        while len(list(here.glob("child*"))) < 2:
            time.sleep(0.05)
        (here / "dead").touch()
        os.kill(SERVER, signal.SIGKILL)
        time.sleep(60)
    """
    end = [hermes.tokenizer.eos_token_id]

    async def ask(ids, **how):
        return answer_of(hermes.encode("yes") + end)

    found = run(hermes, program, ask, count=12, concurrency=3)
    faults = [t.exchange.fault for t in found if t.exchange.fault]
    assert len(faults) == 3 and all("the process that starts all agents has ended" in fault for fault in faults)
    assert sum(t.exchange.score for t in found) == 9.0
    children = [one.name.removeprefix("child") for one in tmp_path.glob("child*")]
    wait_for(lambda: len(children) == 2 and not any(running(pid) for pid in children))


def test_a_process_that_always_dies_ends_the_run(hermes, run):
    program = "\nimport os, signal\nPID = os.getpid()\ndef agent(task): os.kill(PID, signal.SIGKILL)\n"
    with pytest.raises(RolloutError, match=r"agent.py:agent cannot be run: its process ended"):
        run(hermes, program, hermes.policy(), count=8, concurrency=1)


def test_an_error_of_the_engine_ends_the_run(hermes, run):
    async def ask(ids, **how):
        raise RolloutError("all servers are gone")

    with pytest.raises(RolloutError, match="all servers are gone"):
        run(hermes, SAY, ask)


def test_a_file_that_cannot_be_imported_ends_the_run(hermes, run):
    with pytest.raises(RolloutError, match=r"agent.py:agent': .*agent.py cannot be run .*no_such_module"):
        run(hermes, "\nimport no_such_module\ndef agent(task): pass\n", hermes.policy())


def test_an_import_that_takes_too_long_ends_the_run(hermes, run):
    with pytest.raises(RolloutError, match=r"cannot be run: its import exceeds rollout.agent_timeout_s=1"):
        run(hermes, "\nimport time\ntime.sleep(60)\ndef agent(task): pass\n", hermes.policy(), timeout_s=1.0)


@pytest.mark.parametrize("form", ["command", "function"])
def test_agents_end_with_a_killed_trainer(form, tmp_path):
    """Also processes of other sessions, and with a job that the agent's file has left in a pool."""
    agent, pids = tmp_path / "agent.sh", tmp_path / "pids"
    agent.write_text(f"sleep 63 & setsid sleep 63 & echo $$ $! $PPID > {pids}; wait")
    if form == "function":
        (tmp_path / "agent.py").write_text(
            "import concurrent.futures, os, time\n"
            "concurrent.futures.ThreadPoolExecutor().submit(time.sleep, 600)\n"
            f"def agent(task): os.system('bash {agent}')"
        )
    spec = f"bash {agent}" if form == "command" else f"{tmp_path / 'agent.py'}:agent"
    work = f"process.run_agent(process.parse_agent({spec!r}), {{}}, {{}}, 60.0)"
    program = f"import asyncio; from jppo.plugins.agents.gateway import process; asyncio.run({work})"
    with subprocess.Popen([sys.executable, "-c", program]) as trainer:
        wait_for(lambda: pids.is_file() and pids.read_text().endswith("\n"))
        started = [
            stat.parent.name for stat in pathlib.Path("/proc").glob("[0-9]*/stat") if parent(stat) == trainer.pid
        ]
        assert len(started) == 1
        trainer.kill()
    wait_for(lambda: not any(running(pid) for pid in (*started, *pids.read_text().split())))


def parent(stat):
    try:
        return int(stat.read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("code", [3, 0])
def test_an_agent_that_fails_in_a_full_conversation_is_truncated(hermes, run, code):
    program = f"""
    import json, openai
    client, messages = openai.OpenAI(), [{{"role": "user", "content": "hi"}}]
    while True:
        try:
            messages.append(client.chat.completions.create(model="policy", messages=messages).choices[0].message)
        except openai.BadRequestError as e:
            assert e.code == "context_length_exceeded"
            raise SystemExit({code})
        messages.append({{"role": "user", "content": "more"}})
    """
    ask = hermes.policy(*["one two three"] * 20)
    t = run(hermes, program, ask, room=40)
    assert (t.finish == "length") == (t.exchange.fault is None) == (code == 3)  # else it could report a reward
    assert t.exchange.score == 0.0 and t.turns > 1 and len(t.tokens) <= len(ask.asked[0]) + 40


@pytest.mark.parametrize(
    "agent,reward,score",
    [
        ("bash examples/calculator_curl.sh", "graders", 0.0),  # the graders add theirs
        ("examples/calculator_openai.py:multiply", "reported", 1.0),
        ("examples/calculator_anthropic.py:multiply", "exit", 1.0),
        ("tests/plugins/agents/environments/trained_parts.py:multiply", "reported", 1.0),
    ],
)
def test_the_examples_use_their_calculator(plain, run, agent, reward, score, monkeypatch):
    if agent.startswith("bash") and not (shutil.which("jq") and shutil.which("curl")):
        pytest.skip("the example needs jq and curl")
    monkeypatch.chdir(pathlib.Path(__file__).parents[3])
    ask = plain.policy("<<12*34>>", "408")
    t = run(plain, agent, ask, prompt=plain.prompt("12*34="), reward=reward)
    assert t.exchange.fault is None and t.exchange.score == score and t.text == "<<12*34>>[[408]]408"
    assert spans(t) == ask.answers and t.tokens[: int(np.argmax(t.sampled))].tolist() == ask.asked[0]


@pytest.mark.parametrize("client", ["openai", "anthropic"])
def test_requests_that_a_client_has_given_up_end_in_the_engine(hermes, run, client):
    """With a time limit and two repetitions, three requests ran at once for one answer."""
    program = f"""
    import {client}
    try:
        how = dict(model="policy", messages=[{{"role": "user", "content": "hi"}}], max_tokens=9, timeout=2.0)
        client = {client}.{"OpenAI" if client == "openai" else "Anthropic"}(max_retries=2)
        client.{"chat.completions" if client == "openai" else "messages"}.create(**how)
    except {client}.APITimeoutError:
        client.{"chat.completions" if client == "openai" else "messages"}.create(**(how | {{"timeout": 60}}))
    """
    under_way, most, given_up = 0, 0, 0
    end = [hermes.tokenizer.eos_token_id]

    async def ask(ids, **how):
        nonlocal under_way, most, given_up
        under_way, most = under_way + 1, max(most, under_way + 1)
        try:
            if given_up < 3:
                await asyncio.sleep(60)
            return answer_of(hermes.encode("yes") + end)
        except asyncio.CancelledError:
            given_up += 1
            raise
        finally:
            under_way -= 1

    t = run(hermes, program, ask, reward="exit")
    assert (most, given_up) == (1, 3) and t.exchange.score == 1.0 and t.branches == ()


def test_as_many_agents_as_the_limit_of_open_files_allows(tmp_path):
    """The default of 256 agents needs more than 1,024 files: the limit is raised, or the setting refused."""
    program = """
import resource
from jppo.plugins.agents.gateway.episode import Rules
from jppo.plugins.agents.gateway.gateway import Gateway
from jppo.errors import UserError
rules = Rules(max_prompt_length=500, branches=4, reward="exit", timeout_s=20.0)
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 4096))
Gateway("true", None, rules, concurrency=256)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
try:
    Gateway("true", None, rules, concurrency=256)
except UserError as e:
    print(e)
"""
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == (
        "4096\nrollout.agent_concurrency=256 needs 1408 open files; the limit is 1024: lower it to 179, or raise the"
        " limit (ulimit -n)\n"
    )
