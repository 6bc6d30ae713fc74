"""The programs of agents: their environment, output and end."""

import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

from jppo.errors import UserError
from jppo.plugins.agents.gateway import forks, process
from tests.plugins.agents.test_gateway import running, wait_for


@pytest.mark.parametrize(
    "output,last",
    [
        ("a\n{'\u2028\x85\x0c'}\n \n", "{'\u2028\x85\x0c'}"),  # valid in JSON
        ("50%\r100%\rdone\r\n", "done"),
        ("", "\ufffd"),
    ],
)
def test_the_last_line_of_an_output(output, last):
    assert process.last_line(io.BytesIO(b"\xff\n" + output.encode())) == last


def test_the_users_own_hosts_without_a_proxy_stay(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "corp.example")
    monkeypatch.delenv("no_proxy", raising=False)
    env = process.episode_variables("http://127.0.0.1:1", "key")
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,localhost,corp.example"
    monkeypatch.delenv("NO_PROXY")
    assert process.episode_variables("http://127.0.0.1:1", "key")["no_proxy"] == "127.0.0.1,localhost"


def test_a_wrong_name_of_an_agent_is_an_error_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text("raise SystemExit('it ran')\ndef agent(task): pass\n")
    (tmp_path / "broken.py").write_text("def agent(task:\n")
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfdef agent(task): pass\n")
    (tmp_path / "latin.py").write_bytes(b"# coding: latin-1\ndef agent(task): '\xe4'\n")
    (tmp_path / "odd.py").write_bytes(b"# coding: nothing\n")
    for right in (
        "marked.py:agent",
        "latin.py:agent",
        "program.py:agent",
        f"{tmp_path}/program.py:agent",
        "program:agent",
        "os.path:join",
    ):
        process.parse_agent(right)
    for right in ("bash -c 'python3 none.py'", f"{sys.executable} program.py --fast", "python3", "cat none.sh"):
        process.parse_agent(right)
    for wrong, said in (
        ("bash none.sh", "there is no file none.sh"),
        (f"{sys.executable} none.py --fast", "there is no file none.py"),
        ("program.py:agnt", "defines no 'agnt'; it has agent; did you mean 'agent'?"),
        ("program:agnt", "defines no 'agnt'"),
        ("broken.py:agent", "cannot be run (SyntaxError"),
        ("odd.py:agent", "cannot be read"),
        ("no_such_module:agent", "there is no module no_such_module"),
    ):
        with pytest.raises(UserError) as e:
            process.parse_agent(wrong)
        assert said in str(e.value) and str(e.value).startswith(f"rollout.agent={wrong!r}: ")


def test_an_installed_module_comes_before_one_of_the_folder(tmp_path, monkeypatch):
    """As in the process that imports it, where the folder is last; Python's own modules are found, too."""
    for folder, name in (("installed", "agent"), ("here", "other")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "some_agents.py").write_text(f"def {name}(task): pass\n")
    (tmp_path / "here" / "only_here.py").write_text("def agent(task): pass\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.syspath_prepend("")
    monkeypatch.chdir(tmp_path / "here")
    for right in ("some_agents:agent", "only_here:agent", "sys:exit", "json:dumps"):
        process.parse_agent(right)
    with pytest.raises(UserError, match="defines no 'other'"):
        process.parse_agent("some_agents:other")


def ends(tmp_path, program, tasks):
    """How a function ends with each of these tasks, concurrently."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(program))

    async def all_of_them():
        program = process.parse_agent(f"{tmp_path / 'agent.py'}:agent")
        try:
            return await asyncio.gather(*(process.run_agent(program, task, {}, 20.0) for task in tasks))
        finally:
            await program.close()

    return asyncio.run(all_of_them())


def test_a_function_runs_in_a_folder_with_files_of_pythons_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("json", "math", "socket", "helper"):
        (tmp_path / f"{name}.py").write_text("NAME = 'mine'\n")
    (ended,) = ends(tmp_path, "import json, helper\ndef agent(task): return json.loads('[1]') + [helper.NAME]\n", [{}])
    assert (ended.code, ended.last) == (0, '[1, "mine"]')


def test_a_function_that_closes_its_output_ends_no_other(tmp_path):
    program = """
    import sys, time
    def agent(task):
        if task["closes"]:
            sys.stdout.close()
        else:
            time.sleep(0.4)
            print("no end of line", end="")
        return {"reward": 1}
    """
    first, second, closes = ends(tmp_path, program, [{"closes": i == 2} for i in range(3)])
    assert first == second == (0, '{"reward": 1}', "", 'no end of line\n{"reward": 1}') and closes.code == 70
    assert "Traceback" in closes.tail and closes.tail.endswith(closes.error)


def test_a_function_may_return_numbers_of_numpy_and_any_object(tmp_path):
    program = """
    import numpy as np
    def agent(task):
        number = [np.float32(0.5), np.int64(2), np.bool_(True)][task["number"]]
        return {"reward": number, "graph": {"messages": [agent]}}
    """
    found = ends(tmp_path, program, [{"number": i} for i in range(3)])
    assert [json.loads(one.last)["reward"] for one in found] == [0.5, 2, True]


def test_programs_start_one_after_the_other(tmp_path, monkeypatch):
    """Hundreds of unanswered starts would fill the sockets of both sides, which would then wait for each other."""
    sending, waits, unanswered = socket.send_fds, [], []

    def send(*sent):
        waits.append(next(reversed(programs[0]._waiting.values()))[0])
        unanswered.append(sum(not pid.done() for pid in waits))
        return sending(*sent)

    programs = []
    monkeypatch.setattr(process.socket, "send_fds", send)
    monkeypatch.setattr(
        process, "parse_agent", lambda spec, of=process.parse_agent: programs.append(of(spec)) or programs[0]
    )
    found = ends(tmp_path, "def agent(task): return task", [{"reward": i} for i in range(10)])
    assert [json.loads(one.last)["reward"] for one in found] == list(range(10)) and unanswered == [1] * 10


@pytest.fixture
def forking(tmp_path):
    """Starts the process that forks, of a file with this text; returns the gateway's end of its socket and it."""
    started = []

    def start(text):
        (tmp_path / "agent.py").write_text(text)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(20)
        command = [sys.executable, "-m", "jppo.plugins.agents.gateway.forks", str(theirs.fileno()), "function"]
        with theirs:
            made = subprocess.Popen(
                [*command, f"{tmp_path / 'agent.py'}:agent"], pass_fds=[theirs.fileno()], stderr=subprocess.PIPE
            )
        started.append((ours, made))
        return ours, made

    yield start
    for ours, made in started:
        ours.close()
        made.kill()
        made.communicate()


FOREVER = """
import os, pathlib, time
def agent(task):
    pathlib.Path(__file__).with_name("running").write_text(str(os.getpid()))
    time.sleep(3600)
"""


@pytest.mark.parametrize("unread", [False, True])
def test_the_end_of_the_trainer_is_no_crash_and_ends_all_programs(forking, tmp_path, unread):
    """A socket that is closed with messages unread is an error on its other side."""
    channel, made = forking(FOREVER)
    assert json.loads(channel.recv(2**12)) == {"ready": True}
    with open(os.devnull, "r+b") as file, (tmp_path / "task").open("w+b") as task:
        task.write(b"{}\n")
        task.seek(0)
        socket.send_fds(channel, [b'{"id": 3, "env": {}}'], [task.fileno(), file.fileno(), file.fileno()])
    if not unread:
        assert json.loads(channel.recv(2**12)) == {"id": 3}
    wait_for(lambda: (tmp_path / "running").exists() and (tmp_path / "running").read_text())
    channel.close()
    assert (made.wait(60), made.stderr.read()) == (0, b"")
    assert not running((tmp_path / "running").read_text())


def test_a_command_that_cannot_start_has_the_exit_code_of_a_shell(monkeypatch, capsys):
    monkeypatch.setattr(forks.signal, "signal", lambda *_: None)
    assert forks._execute(["/nowhere/agent"]) == 127
    assert capsys.readouterr().err.startswith("/nowhere/agent cannot be started: ")


@pytest.mark.parametrize(
    "text, sent, said",
    [
        ("raise ValueError('odd')", b"", b"ValueError: odd"),
        ("raise SystemExit('no luck')", b"", b"SystemExit: no luck"),
        (FOREVER, b"no JSON", b"JSONDecodeError"),
    ],
)
def test_a_crash_has_its_exit_code(forking, text, sent, said):
    channel, made = forking(text)
    if sent:
        assert json.loads(channel.recv(2**12)) == {"ready": True}
        channel.send(sent)
    assert made.wait(60) == forks.CRASHED == 70
    assert said in made.stderr.read()
