"""Tools from files, their answers cut to size, the sandboxed Python, and search."""

import asyncio
import json
import math
import re
import threading

import numpy as np
import pytest

from jppo.errors import UserError
from jppo.plugins.agents.built_in_tools import Index, Python, Search
from jppo.plugins.agents.calls import Call
from jppo.plugins.agents.tools import Toolbox, ToolLimits, UserCodeRunner, cut_to_length, read_tools
from jppo.types import Prompt
from tests.make import until


@pytest.mark.parametrize(
    "side,length,cut_to",
    [
        ("left", 7, "...6789"),
        ("right", 7, "0123..."),
        ("middle", 7, "01...89"),
        ("middle", 8, "012...89"),
        ("left", 10, "0123456789"),
        ("right", 3, "012"),
        ("middle", 1, "0"),
        ("left", 1, "9"),
    ],
)
def test_cut(side, length, cut_to):
    assert cut_to_length("0123456789", length, side) == cut_to


USER = """
SCHEMA = {"type": "function", "function": {"name": "echo", "parameters": {}}}

class Echo:
    schema = SCHEMA
    def __init__(self, times=1):
        self.times = times
    def __call__(self, arguments, context):
        return "echo " * self.times

class NoSchema:
    async def __call__(self, arguments, context): ...

class NoCall:
    schema = SCHEMA

class NoContext:
    schema = SCHEMA
    def __call__(self, text): ...

def tools():
    return [Echo(times=2)]
"""


@pytest.fixture
def write(tmp_path):
    (tmp_path / "mine.py").write_text(USER)

    def write(text, name="tools.yaml"):
        (tmp_path / name).write_text(text.format(mine=tmp_path / "mine.py"))
        return str(tmp_path / name)

    return write


def test_yaml_and_python_name_the_same_tools(write, tmp_path):
    yaml = write(
        "tools:\n  - class_name: '{mine}:Echo'\n    config: {{times: 2}}\n  - class_name: calculator\n"
        "    tool_schema: {{type: function, function: {{name: reckon, parameters: {{}}}}}}\n"
    )
    tools = read_tools(yaml, allow_code=False)
    assert [t.schema["function"]["name"] for t in tools] == ["echo", "reckon"]
    [other] = read_tools(str(tmp_path / "mine.py"), allow_code=False)
    assert other({}, None) == tools[0]({}, None) == "echo echo "
    assert read_tools("", allow_code=False) == []


@pytest.mark.parametrize(
    "text,said",
    [
        ("tools: []", "lists no tool"),
        ("", "must have a list `tools`"),
        ("tools: [3]", "must have a list `tools`"),
        ("tools: {{", "is not valid YAML"),
        ("tools:\n- class_name: oven", "class_name='oven' is not known; it is one of 'calculator', 'python', 'search'"),
        ("tools:\n- class_name: calculator\n- class_name: calculator", "two tools of the name 'calculator'"),
        ("tools:\n- class_name: calculator\n  color: red", "'color' is not known"),
        ("tools:\n- class_name: calculator\n  config: {{a: 1}}", "calculator cannot be created with config={'a': 1}"),
        ("tools:\n- class_name: 3", "an entry is class_name (text), config and tool_schema (objects)"),
        ("tools:\n- class_name: calculator\n  config: [1]", "an entry is class_name (text), config"),
        ("tools:\n- class_name: calculator\n  tool_schema: text", "an entry is class_name (text), config"),
        ("tools:\n- class_name: '{mine}:NoSchema'", "NoSchema has no schema in OpenAI's form"),
        ("tools:\n- class_name: '{mine}:NoCall'", "the tool 'echo' cannot be called"),
        ("tools:\n- class_name: '{mine}:NoContext'", "the tool 'echo' takes (text); it must take (arguments, context)"),
        ("tools:\n- class_name: '{mine}:Nobody'", "defines no 'Nobody'"),
        ("tools:\n- class_name: python", "rollout.multi_turn.allow_code=True"),
        ("tools:\n- class_name: python\n  config: {{workers: 0}}", "workers=0 at least 1"),
        (
            "tools:\n- class_name: calculator\n  tool_schema: {{function: {{name: add, parameters: [a]}}}}",
            "the tool 'add' has parameters=['a']; it must be an object whose `properties` is an object",
        ),
        (
            "tools:\n- {{class_name: calculator, tool_schema: {{function: {{name: f, parameters: {{properties: [3]}}"
            " }}}}}}",
            "the tool 'f' has parameters={'properties': [3]}; it must be an object whose `properties` is an object",
        ),
        (
            "tools:\n- class_name: calculator\n  tool_schema: {{function: {{name: f, parameters: {{required: a}}}}}}",
            "the tool 'f' has parameters={'required': 'a'}; it must be",
        ),
        ("tools:\n- class_name: search\n  config: {{path: /none/x.txt}}", "no file /none/x.txt"),
        ("tools:\n- class_name: search\n  config: {{path: x.pdf}}", "must be a .txt, .jsonl"),
    ],
)
def test_a_file_that_does_not_do_is_one_line(write, text, said):
    path = write(text)
    with pytest.raises(UserError) as e:
        read_tools(path, allow_code=False)
    assert said in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "name,text", [("a.py", "x = 1"), ("b.py", "def tools(): 1/0"), ("c.py", "1/0"), ("d.py", None)]
)
def test_a_python_file_that_does_not_do_is_one_line(write, tmp_path, name, text):
    path = str(tmp_path / name) if text is None else write(text, name)
    with pytest.raises(UserError) as e:
        read_tools(path, allow_code=False)
    assert path in str(e.value) and "\n" not in str(e.value)


def test_a_program_may_take_no_longer_than_a_call(write):
    path = write("tools:\n- class_name: python\n  config: {{timeout_s: 6}}")
    with pytest.raises(UserError, match=r"may take its timeout_s and a start, 11 s; .*tool_timeout_s=10 must be") as e:
        read_tools(path, allow_code=True, timeout_s=10.0)
    assert path in str(e.value) and "\n" not in str(e.value)
    for tool in (
        *read_tools(path, allow_code=True, timeout_s=11.0),
        *read_tools(write("tools:\n- class_name: python"), allow_code=True, timeout_s=10.0),  # the defaults
    ):
        tool.close()


def ask(tool, *calls, user_code, timeout_s=20.0):
    box = Toolbox([tool], ToolLimits(len(calls), 200, "middle", timeout_s), user_code)
    name = tool.schema["function"]["name"]
    prompt = Prompt("p", "s", "q", np.array([1]), "", {})
    told = asyncio.run(box.call([Call(name, arguments) for arguments in calls], prompt, {}))
    return [message["content"] for message in told.messages], told


@pytest.fixture
def user_code():
    made = UserCodeRunner()
    yield made
    made.close()


def test_python_runs_programs_in_processes_with_limits(user_code, tmp_path):
    tool, hasty = Python(timeout_s=60.0, workers=2), Python(timeout_s=2.0, workers=1)
    programs = [
        "print(6 * 7)",
        "print('so far')\n1 / 0",
        f"open('{tmp_path}/left', 'w')",
        "import sys; sys.exit(3)",
        "x = bytearray(2**34)",
        "print(",
    ]
    try:
        said, told = ask(tool, *({"code": program} for program in programs), user_code=user_code, timeout_s=60.0)
        late, waited = ask(hasty, {"code": "while True: pass"}, user_code=user_code)
    finally:
        tool.close()
        hasty.close()
    assert said[0] == "42\n" and said[1] == "so far\nerror: ZeroDivisionError: division by zero"
    assert late == ["error: the program took longer than 2 s"] and waited.errors == 0 and waited.seconds > 2
    # without namespaces the folder is there, and PermissionError says that it is not the program's
    assert re.search("PermissionError|FileNotFoundError", said[2]) and not (tmp_path / "left").exists()
    assert said[3] == "error: exit code 3" and "MemoryError" in said[4] and "SyntaxError" in said[5]
    assert told.errors == 0


def test_calls_that_wait_for_a_slot_are_not_late(user_code):
    class One:
        concurrency = 1
        at_once = most = 0

        def __init__(self):
            self.schema = {"type": "function", "function": {"name": "one", "parameters": {}}}

        async def __call__(self, arguments, context):
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            await asyncio.sleep(0.4)
            self.at_once -= 1
            return "done"

    tool = One()
    said, told = ask(tool, *[{}] * 6, user_code=user_code, timeout_s=2.0)  # less than all six take
    assert said == ["done"] * 6 and told.errors == 0 and tool.most == 1
    assert ask(tool, *[{}] * 2, user_code=user_code, timeout_s=2.0)[0] == said[:2]  # on the loop of another step


def test_what_hangs_ends_with_the_run():
    user_code, ended = UserCodeRunner(), threading.Event()

    async def hang():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def late():
        with pytest.raises(TimeoutError):
            await user_code.run(hang, timeout_s=0.05)

    asyncio.run(late())
    assert ended.wait(60)
    asyncio.run(late())
    user_code.close()
    user_code.close()
    until(lambda: not any(t.name == "jppo-tools" and t.is_alive() for t in threading.enumerate()))


TEXTS = ["the cat sat on the mat", "a dog and a cat", "dogs bark", "The DOG barks at the dog"]


def by_hand(query, k=1.2, b=0.75):
    """BM25 as it is written, text by text."""
    words = [text.lower().split() for text in TEXTS]
    mean = sum(map(len, words)) / len(words)
    out = []
    for text in words:
        score = 0.0
        for term in query.lower().split():
            n = sum(term in other for other in words)
            f = text.count(term)
            score += (
                math.log((len(words) - n + 0.5) / (n + 0.5) + 1)
                * f
                * (k + 1)
                / (f + k * (1 - b + b * len(text) / mean))
            )
        out.append(score)
    return out


@pytest.mark.parametrize("query", ["dog", "the cat", "dog dog barks", "bird", ""])
def test_search_scores_by_bm25(query):
    assert Index(TEXTS).scores(query).tolist() == pytest.approx(by_hand(query))


def test_search_finds_what_fits(tmp_path, user_code):
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"passage": t}) + "\n" for t in TEXTS))
    queries = [{"query": "dog"}, {"query": "bird"}, {"query": 3}]
    for tool in (
        Search(path=str(tmp_path / "texts.txt"), results=1),
        Search(path=str(tmp_path / "texts.jsonl"), column="passage", results=1),
    ):
        said, _ = ask(tool, *queries, user_code=user_code)
        assert said == ["[1] The DOG barks at the dog", "nothing was found", "nothing was found"]
    with pytest.raises(UserError, match="has no 'text'"):
        Search(path=str(tmp_path / "texts.jsonl"))
    (tmp_path / "empty.txt").write_text(" \n\n ")
    with pytest.raises(UserError, match="has no text"):
        Search(path=str(tmp_path / "empty.txt"))
