"""The programs of agents: their environment, output and end."""

import asyncio
import io
import json
import socket
import textwrap

import pytest

from jppo.agent.gateway import process


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
    env = process.environment("http://127.0.0.1:1", "key")
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,localhost,corp.example"
    monkeypatch.delenv("NO_PROXY")
    assert process.environment("http://127.0.0.1:1", "key")["no_proxy"] == "127.0.0.1,localhost"


def ends(tmp_path, program, tasks):
    """How a function ends with each of these tasks, concurrently."""
    (tmp_path / "agent.py").write_text(textwrap.dedent(program))

    async def all_of_them():
        program = process.program_of(f"{tmp_path / 'agent.py'}:agent")
        try:
            return await asyncio.gather(*(process.run(program, task, {}, 20.0) for task in tasks))
        finally:
            await program.close()

    return asyncio.run(all_of_them())


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
    assert first == second == (0, '{"reward": 1}', "") and closes.code == 70


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
        process, "program_of", lambda spec, of=process.program_of: programs.append(of(spec)) or programs[0]
    )
    found = ends(tmp_path, "def agent(task): return task", [{"reward": i} for i in range(10)])
    assert [json.loads(one.last)["reward"] for one in found] == list(range(10)) and unanswered == [1] * 10
