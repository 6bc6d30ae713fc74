"""The sandbox: protections that are found or missing, the filter's table, and a service that runs programs."""

import contextlib
import fcntl
import functools
import http.server
import json
import os
import pathlib
import subprocess
import sys
import sysconfig
import termios
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from jppo import settings
from jppo.errors import UserError
from jppo.plugins.agents.built_in_tools import Python
from jppo.plugins.sandbox import choice, confine, kernel, launcher, peer, plain
from jppo.plugins.sandbox.choice import describe_sandbox, make_runner
from jppo.plugins.sandbox.code import code, program_output, refusal_reason
from jppo.plugins.sandbox.launcher import Guards, NoSandbox
from jppo.rewards.graders import RulePart
from jppo.rewards.pool import Pool
from jppo.run.start import introduce_sandbox
from tests.make import alive, sample, typed
from tests.plugins.sandbox.hostile_programs import PROGRAMS
from tests.rewards import graded

RIGHT = "def f(x):\n    return x + 1\n"
ASSERTS = "assert f(1) == 2\nassert f(2) == 3"
SUMS = json.dumps([{"input": "1 2\n", "output": "3\n"}])
SUM = "print(sum(map(int, input().split())))"


def response(program):
    return f"```python\n{program}\n```"


SAID = {0x7FFF0000: "allow", 0x80000000: "kill", 0x00050000: "done"}
SAID |= {0x00050001: "EPERM", 0x00050026: "ENOSYS", 0x0005005F: "EOPNOTSUPP"}


def interpret(instructions, number, args=(), *, arch):
    """What a filter says of a system call."""
    words = {0: number, 4: arch} | {16 + 8 * i: a & 0xFFFFFFFF for i, a in enumerate(args)}
    words |= {20 + 8 * i: a >> 32 for i, a in enumerate(args)}
    at, register = 0, 0
    while True:
        operation, true, false, k = instructions[at]
        at += 1
        if operation == 0x20:
            register = words.get(k, 0)
        elif operation == 0x06:
            return SAID[k]
        else:
            holds = {0x15: register == k, 0x25: register > k, 0x45: bool(register & k)}[operation]
            at += true if holds else false


FCNTL = "F_DUPFD F_GETFD F_SETFD F_GETFL F_SETFL F_GETLK F_DUPFD_CLOEXEC F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS"
IOCTL = "TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX"


@pytest.mark.parametrize(
    ("name", "x86", "arm", "args", "said"),
    [
        ("read", 0, 63, (), "allow"),
        ("ptrace", 101, 117, (), "EPERM"),
        ("socket", 41, 198, (), "EPERM"),
        ("socketpair: a stream", 53, 199, (1, 1), "allow"),
        ("socketpair: an event loop's", 53, 199, (1, 1 | 0o2000000 | 0o4000), "allow"),
        ("socketpair: datagrams", 53, 199, (1, 2), "EPERM"),
        ("socketpair: datagrams, flags", 53, 199, (1, 2 | 0o2000000 | 0o4000), "EPERM"),
        ("socketpair: raw", 53, 199, (1, 3), "EPERM"),
        ("socketpair: packets", 53, 199, (1, 5), "EPERM"),
        ("socketpair: TIPC", 53, 199, (30, 1), "EPERM"),
        ("sendto: its other end", 44, 206, (3, 4096, 1, 0, 0, 0), "allow"),
        ("sendto: an address", 44, 206, (3, 4096, 1, 0, 4096, 110), "EPERM"),
        ("sendto: an address above 4 GiB", 44, 206, (3, 4096, 1, 0, 2**32, 110), "EPERM"),
        ("sendmsg", 46, 211, (3, 4096), "EPERM"),
        ("flock", 73, 32, (3, 2), "EPERM"),
        ("io_setup", 206, 0, (), "EPERM"),
        ("execve", 59, 221, (), "EPERM"),
        ("io_uring_setup", 425, 425, (), "EPERM"),
        ("landlock_create_ruleset", 444, 444, (), "EPERM"),
        ("landlock_add_rule", 445, 445, (), "EPERM"),
        ("landlock_restrict_self", 446, 446, (), "EPERM"),
        ("keyctl", 250, 219, (), "EPERM"),
        ("fchmodat2", 452, 452, (), "ENOSYS"),
        ("clone: a thread", 56, 220, (0x3D0F00,), "allow"),
        ("clone: a process", 56, 220, (17,), "EPERM"),
        ("clone3", 435, 435, (), "ENOSYS"),
        ("kill: itself", 62, 129, (77, 9), "allow"),
        ("kill: another", 62, 129, (78, 9), "EPERM"),
        ("kill: all", 62, 129, (2**64 - 1, 9), "EPERM"),
        ("tgkill: itself", 234, 131, (77, 78, 9), "allow"),
        ("tgkill: another", 234, 131, (1, 1, 9), "EPERM"),
        ("prlimit64: reads", 302, 261, (0, 7, 0, 4096), "allow"),
        ("prlimit64: sets", 302, 261, (0, 7, 4096, 0), "EPERM"),
        ("prlimit64: sets, above 4 GiB", 302, 261, (0, 7, 2**32, 0), "EPERM"),
        ("prlimit64: another", 302, 261, (5, 7, 0, 0), "EPERM"),
        ("openat: reads", 257, 56, (0, 0, os.O_RDONLY), "allow"),
        ("openat: writes", 257, 56, (0, 0, os.O_WRONLY | os.O_TRUNC), "allow"),
        ("openat: creates", 257, 56, (0, 0, os.O_WRONLY | os.O_CREAT), "allow"),
        ("openat: creates a new one", 257, 56, (0, 0, os.O_RDWR | os.O_CREAT | os.O_EXCL), "allow"),
        ("openat: empties", 257, 56, (0, 0, os.O_RDONLY | os.O_TRUNC), "EPERM"),
        *((f"fcntl: {name}", 72, 25, (3, getattr(fcntl, name)), "allow") for name in FCNTL.split()),
        ("fcntl: owner", 72, 25, (3, 8), "EPERM"),
        ("fcntl: a record lock", 72, 25, (3, 6), "done"),
        ("fcntl: waits for a record lock", 72, 25, (3, 7), "done"),
        ("fcntl: a lock of the description", 72, 25, (3, 37), "EPERM"),
        ("fcntl: a lease", 72, 25, (3, 1024), "EPERM"),
        ("fcntl: a large pipe", 72, 25, (3, 1031), "EPERM"),
        *((f"ioctl: {name}", 16, 29, (0, getattr(termios, name)), "allow") for name in IOCTL.split()),
        ("ioctl: preallocates", 16, 29, (0, 0x4030582A), "EOPNOTSUPP"),
        ("prctl: hides its counters", 157, 167, (4, 0), "EPERM"),
        ("prctl: outlives its parent", 157, 167, (1, 0), "EPERM"),
        ("prctl: its name", 157, 167, (15, 0), "allow"),
        ("ioctl: TIOCSTI", 16, 29, (0, 0x5412), "EPERM"),
        ("fstat", 5, 80, (), "allow"),
    ],
)
def test_the_filter_of_both_architectures(name, x86, arm, args, said):
    for machine, number, arch in ((kernel.X86_64, x86, 0xC000003E), (kernel.AARCH64, arm, 0xC00000B7)):
        filtered = confine.build_filter(machine, 77)
        assert interpret(filtered, number, args, arch=arch) == said
        assert interpret(filtered, number, args, arch=0x40000003) == "kill"  # a 32-bit call
    assert interpret(confine.build_filter(kernel.X86_64, 77), 0x40000000 | x86, args, arch=0xC000003E) == "kill"  # x32


def test_a_program_has_its_standard_streams_alone():
    program = "import os\nprint([fd for fd in range(3, 200) if os.path.exists(f'/proc/self/fd/{fd}')])\n" + (
        "for fd in range(3, 200):\n    try: print('open', fd, os.fstat(fd))\n    except OSError: pass"
    )
    ran = launcher.run_program(program, guards=choice.probe(), time_s=20, memory_bytes=2**30)
    assert (ran.status, ran.printed) == (0, "[]\n")


def test_a_program_starts_without_what_only_tests_need():
    """Their imports would delay every program."""
    own = (f"jppo.plugins.sandbox.{name}" for name in ("child", "marks", "peer", "reader"))
    names = ["ast", "json", "re", "signal", "typing", *own]
    program = f"import sys\nprint([name for name in {names} if name in sys.modules])"
    ran = launcher.run_program(program, guards=choice.probe(), time_s=20, memory_bytes=2**30)
    assert (ran.status, ran.printed) == (0, "['jppo.plugins.sandbox.child']\n")


def test_preallocation_is_refused_where_blocks_are_counted():
    for machine, number, arch in ((kernel.X86_64, 285, 0xC000003E), (kernel.AARCH64, 47, 0xC00000B7)):
        assert interpret(confine.build_filter(machine, 77), number, arch=arch) == "allow"
        assert interpret(confine.build_filter(machine, 77, counted=True), number, arch=arch) == "EOPNOTSUPP"


def test_the_strongest_guards_are_found_and_pretending_weakens_them():
    here, without = choice.probe(), choice.probe(frozenset({"namespaces"}))
    assert without.spaces == "none" and without.landlock == here.landlock and without.seccomp == here.seccomp
    everything = {"landlock", "namespaces", "seccomp", "user", "cgroup", "folder quota"}
    assert choice.probe(frozenset(everything)) == Guards()
    assert {guards.uid for guards in choice._candidates({"user"})} == {None}
    assert (launcher.NOBODY in {guards.uid for guards in choice._candidates(())}) == (os.geteuid() == 0)


@pytest.mark.parametrize(
    ("guards", "why"),
    [
        (Guards(7, True, "root", 65534), ""),
        (Guards(1, True, "none", counted=True), ""),
        (Guards(1, True, "none"), "nothing bounds their files"),
        (Guards(0, True, "user"), ""),
        (Guards(0, True, "none", counted=True), "neither Landlock"),
        (Guards(7, False, "root"), "no seccomp filter"),
    ],
)
def test_what_strict_needs(guards, why, monkeypatch):
    assert choice.lacks(guards).startswith(why) and bool(choice.lacks(guards)) == bool(why)
    monkeypatch.setattr(choice, "probe", lambda: guards)
    if why:
        with pytest.raises(ValueError, match=rf"reward.sandbox='strict': {why}.*reward.sandbox=container"):
            make_runner("strict")
        assert "WARNING" in describe_sandbox("basic")
        with pytest.raises(UserError, match=r"the tool python: reward\.sandbox='strict'"):
            Python()
    else:
        make_runner("strict")
        assert "WARNING" not in describe_sandbox("basic")
    make_runner("basic")


LOCKS = """
import fcntl, os, time
library = open(LIBRARY, "rb")
for lock in (fcntl.flock, fcntl.lockf):
    try:
        lock(library, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        pass
    try:
        lock(library, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        pass
try:
    fcntl.fcntl(library, 1024, fcntl.F_RDLCK)
except OSError:
    pass
print("locked", flush=True)
time.sleep(3)
"""


@pytest.mark.parametrize("without", ["", "namespaces"])
def test_a_program_locks_no_library(without, tmp_path):
    """While it runs, another process takes every lock on a file that the program can read, and writes it."""
    library = pathlib.Path(sysconfig.get_path("purelib")) / f"jppo-lock-{os.getpid()}.txt"
    library.write_text("library")
    program = LOCKS.replace("LIBRARY", repr(str(library)))
    guards = choice.probe(frozenset(filter(None, [without])))
    try:
        with ThreadPoolExecutor(1) as pool, library.open("r+b") as mine:
            running = pool.submit(launcher.run_program, program, guards=guards, time_s=60, memory_bytes=2**29)
            tries = 0
            while not running.done():
                for lock in (fcntl.flock, fcntl.lockf):
                    lock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    lock(mine, fcntl.LOCK_UN)
                os.close(os.open(library, os.O_WRONLY | os.O_NONBLOCK))  # a lease would refuse it
                tries += 1
                time.sleep(0.01)
        assert running.result().printed == "locked\n" and tries > 50
    finally:
        library.unlink()


@pytest.mark.parametrize("without", ["", "namespaces"])
@pytest.mark.parametrize(
    "program, printed, status",
    [
        ("open('/dev/null', 'w').write('x'); print(len(open('/dev/urandom', 'rb').read(4)))", "4\n", 0),
        ("import ctypes; print('now', flush=True); ctypes.string_at(0)", "now\n", -11),
    ],
)
def test_devices_are_open_and_a_signal_is_told(program, printed, status, without):
    guards = choice.probe(frozenset(filter(None, [without])))
    ran = launcher.run_program(program, guards=guards, time_s=60, memory_bytes=2**29)
    assert (ran.printed, ran.status) == (printed, status)


def test_a_control_group_bounds_threads_and_is_removed():
    if not (groups := launcher.group_bases()):
        pytest.skip("no control group can be made here")
    threads = (
        "import os, threading, time\nn = 0\ntry:\n"
        "    while n < 200:\n        threading.Thread(target=time.sleep, args=(60,)).start()\n        n += 1\n"
        "except RuntimeError:\n    pass\nprint(n, flush=True)\nos._exit(0)"
    )
    ran = launcher.run_program(threads, guards=Guards(groups=groups), time_s=60, memory_bytes=2**32)
    assert 0 < int(ran.printed) < launcher.THREADS + 2
    assert not [name for base in groups for name in os.listdir(base) if name.startswith(f"jppo-{os.getpid()}-")]


def test_threads_of_one_program_are_not_counted_as_anothers():
    guards = choice.probe()
    groups = launcher._make_groups(guards.groups, memory=2**30, processes=64)
    bounded = any(os.path.exists(f"{group}/pids.max") for group in groups)
    launcher._remove_groups(groups)
    if not bounded:
        pytest.skip("no control group bounds processes here")
    begins = (
        "import threading, time\nprint(1, flush=True)\ntime.sleep(3)\nthreading.Thread(target=print, args=(2,)).start()"
    )
    takes_all = (
        "import os, threading, time\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "except RuntimeError:\n    time.sleep(5)\nos._exit(0)"
    )
    run = functools.partial(launcher.run_program, guards=guards, time_s=60, memory_bytes=2**32)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, begins)
        time.sleep(1)
        second = pool.submit(run, takes_all)
        assert (first.result().printed, second.result().status) == ("1\n2\n", 0)


def test_folders_of_workers_that_were_killed_are_removed(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f"jppo-code-{gone.pid}-old": 7200, f"jppo-code-{gone.pid}-new": 60, f"jppo-code-{os.getpid()}-mine": 7200}
    for name, age in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    launcher._remove_leftovers(str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {f"jppo-code-{gone.pid}-old"}


def test_guards_that_the_kernel_refuses_run_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "_DEVICES", ["/dev/null"])
    with pytest.raises(NoSandbox, match="could not be closed"):
        launcher.run_program(
            "print(1)", guards=Guards(spaces="no such way", uid=2**32 - 1), time_s=9, memory_bytes=2**28
        )


def test_nothing_is_left_of_a_program_that_the_trainer_no_longer_waits_for(tmp_path):
    """A worker that is killed takes its program along, also one in a process namespace of its own."""
    script = (
        "from jppo.plugins.sandbox import choice, launcher\n"
        "guards = choice.probe()\nprint('ready', flush=True)\n"
        "launcher.run_program('import time\\ntime.sleep(4711.75)', guards=guards, time_s=3600, memory_bytes=2**28)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=os.getcwd(), text=True)
    assert worker.stdout.readline() == "ready\n"
    end = time.monotonic() + 60
    while not (found := children(worker.pid)) and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)  # into the program
    found = [*found, *(grand for child in found for grand in children(child))]
    worker.kill()
    worker.wait()
    worker.stdout.close()
    assert found
    while (left := [pid for pid in found if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.02)
    assert not left


def children(pid):
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as f:
            return [int(one) for one in f.read().split()]
    except OSError:
        return []


@pytest.fixture
def stand_in():
    """A sandbox service that really runs what it is sent; `plan` holds what it does with the first requests."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append((self.path, body))
            doing = server.plan.pop(0) if server.plan else "run"
            if doing == "cut":
                return self.connection.close()
            if isinstance(doing, int):
                return self.send_error(doing)
            reply = doing if isinstance(doing, dict) else execute(body, server.folder)
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.plan, server.folder = [], [], None
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def execute(body, folder):
    """Runs the code of a request: in a file of the folder, or where there is none as an argument."""
    command = [sys.executable, "-I", "-c", body["code"]]
    if folder is not None:
        file = folder / f"{uuid.uuid4().hex}.py"
        file.write_text(body["code"])
        command[2:] = [str(file)]
    try:
        done = subprocess.run(command, input=body["stdin"], capture_output=True, text=True, timeout=body["run_timeout"])
    except subprocess.TimeoutExpired:
        result = {"status": "TimeLimitExceeded", "execution_time": body["run_timeout"], "return_code": None}
        return {"status": "Failed", "message": "", "compile_result": None, "run_result": result}
    result = {
        "status": "Finished",
        "execution_time": 0.1,
        "return_code": done.returncode,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }
    return {"status": "Failed" if done.returncode else "Success", "compile_result": None, "run_result": result}


def test_a_service_grades_as_the_sandbox_here(stand_in):
    run = make_runner("container", stand_in.url)
    grade = functools.partial(code, time_s=60.0, memory_bytes=2**29, runner=run)
    assert grade(response(RIGHT + "print('noise')"), ASSERTS).score == 1.0
    assert grade(response("def f(x): return 2"), ASSERTS).score == 0.0
    assert grade(response("class E:\n    def __eq__(s, o): return True\ndef f(x): return E()"), ASSERTS).score == 0.0
    assert grade(response("import os\nos._exit(0)"), ASSERTS).score == 0.0
    assert grade(response(SUM), SUMS).score == 1.0 and grade(response("print(4)"), SUMS).score == 0.0
    path, body = stand_in.asked[0]
    assert path == "/run_code" and body["language"] == "python"
    assert {"code", "stdin", "run_timeout", "compile_timeout"} <= body.keys()
    assert all('"3' not in asked["code"] for _, asked in stand_in.asked)  # an output that is expected
    limits = {"time_s": 60.0, "memory_bytes": 2**29, "runner": run}
    assert program_output("print(6 * 7)", **limits) == "42\n"
    assert program_output("print(1)\n1 / 0", **limits) == "1\nerror: ZeroDivisionError: division by zero"
    assert program_output("while True: pass", **limits | {"time_s": 1.0}) == "error: the program took longer than 1 s"


def test_nothing_is_left_of_a_program_that_a_service_ends_for_its_time(stand_in, monkeypatch):
    """The service ends the process that it has started, the one of the tests."""
    monkeypatch.setenv("OF_THIS_TEST", mark := uuid.uuid4().hex)

    def left() -> list[pathlib.Path]:
        found = []
        for environment in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                found += [environment] * (mark.encode() in environment.read_bytes())
        return [one for one in found if one.parent.name != str(os.getpid())]

    seen, over = [], threading.Event()

    def look():
        while not over.wait(0.05):
            seen.extend(left())

    watch = threading.Thread(target=look)
    watch.start()
    grade = functools.partial(code, time_s=1.0, memory_bytes=2**29, runner=make_runner("container", stand_in.url))
    assert grade(response("import time\ndef f(x): time.sleep(3600)"), ASSERTS).score == 0.0
    over.set()
    watch.join()
    assert seen, "the processes could be seen"
    deadline = time.monotonic() + 60
    while left():
        assert time.monotonic() < deadline, left()
        time.sleep(0.05)


def test_a_service_that_fails_is_asked_again_and_counted(stand_in, monkeypatch):
    monkeypatch.setattr(choice, "FIRST_WAIT_S", 0.01)
    grade = functools.partial(
        code, time_s=60.0, memory_bytes=2**29, runner=make_runner("container", stand_in.url + "/run_code")
    )
    stand_in.plan[:] = [503, "cut", {"status": "SandboxError", "message": "full"}, {"no": "run_result"}]
    found = grade(response(RIGHT), ASSERTS)
    assert found.score == 1.0 and found.parts["sandbox_retries"] == 4 and len(stand_in.asked) == 5
    stand_in.plan[:] = [500] * 9
    with pytest.raises(NoSandbox, match="failed 5 times; the last: HTTP 500"):
        grade(response(RIGHT), ASSERTS)
    stand_in.plan[:] = [404]
    with pytest.raises(NoSandbox, match="answered HTTP 404"):
        grade(response(RIGHT), ASSERTS)


@pytest.mark.parametrize("result", [{"return_code": "x"}, {"return_code": 1e999}, {"stdout": 5}, {"stdout": ["a"]}])
def test_a_service_that_answers_with_anything_is_asked_again(result):
    with pytest.raises(choice._TemporaryFailure, match="a reply without"):
        choice._parse_reply({"status": "Success", "run_result": {"status": "Finished"} | result}, True)


def test_programs_are_counted(stand_in):
    part = RulePart(
        ["code"],
        allow_code=True,
        sandbox=("container", stand_in.url),
        pool=Pool(1, timeout_s=20.0, memory_bytes=2**30),
    )
    try:
        stand_in.plan[:] = [503, "run", 404]
        programs = [RIGHT, RIGHT, "import gc\n" + RIGHT]
        rewards = [part.submit(sample(response(one), ASSERTS, source="code")).result(60) for one in programs]
        assert [r.error is None for r in rewards] == [True, False, True] and rewards[2].score == 1.0
        counted = {"reward/code/suspicious": 1.0, "reward/code/errors": 1.0, "reward/code/retries": 1.0}
        assert part.metrics() == counted and part.metrics() == dict.fromkeys(counted, 0.0)
    finally:
        part.close()


@pytest.mark.parametrize("tests", [ASSERTS, "try:\n    f('a')\n    assert False\nexcept TypeError:\n    pass"])
def test_a_program_that_reaches_for_its_interpreter_is_counted_and_graded(tests):
    grade = functools.partial(code, time_s=60.0, memory_bytes=2**29)
    assert grade(response("import gc\n" + RIGHT), tests) == (
        1.0,
        {"exact": 1.0, "answered": 1.0, "suspicious": 1.0},
        None,
    )


@pytest.mark.parametrize("kind", graded.CHEATS)
@pytest.mark.parametrize("as_file", [True, False])
def test_a_cheat_earns_nothing_at_a_service(stand_in, tmp_path, kind, as_file):
    stand_in.folder = tmp_path if as_file else None
    time_s = 4.0 if kind in ("endless", "huge") else 10.0  # these take all of it
    grade = functools.partial(code, time_s=time_s, memory_bytes=2**31, runner=make_runner("container", stand_in.url))
    cheats = [(program, blocks[0]) for program, blocks in graded.CHEATS[kind] if not refusal_reason(blocks[0])]
    for program, tests in cheats[: 3 if as_file or kind == "/proc" else 1]:
        assert grade(response(program), tests).score == 0.0


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"sandbox": "container"}, "set reward.sandbox_url=http://HOST:PORT"),
        (
            {"sandbox_url": "http://here:1"},
            "reward.sandbox_url='http://here:1' is read only with reward.sandbox='container'",
        ),
        ({"sandbox": "none"}, "reward.sandbox='none'"),
    ],
)
def test_settings_that_cannot_be(overrides, complaint):
    c = settings.default()
    c.model.path = c.data.train_files = c.data.val_files = "x"
    c.reward.update(overrides)
    with pytest.raises(UserError, match=complaint):
        settings.check(c)


@pytest.mark.parametrize("url", ["here:8080", "ftp://here", "http://", "http://me:secret@here"])
def test_an_address_that_is_none_or_holds_a_password(url):
    with pytest.raises(ValueError, match=r"reward\.sandbox_url") as e:
        make_runner("container", url)
    assert "secret" not in str(e.value)


def test_a_run_says_first_which_protections_are_active():
    c = settings.default()
    assert introduce_sandbox(typed(c), ["gsm8k"], None) == ""
    assert introduce_sandbox(typed(c), ["gsm8k", "code"], None).startswith("sandbox: strict, ")
    c.reward.grader = "code"
    c.reward.sandbox, c.reward.sandbox_url = "container", "http://here"
    assert introduce_sandbox(typed(c), ["gsm8k"], None) == "sandbox: container, by http://here"


@pytest.mark.parametrize(
    ("program", "truth"), [(p, t) for g, _, p, t, _ in PROGRAMS if g == "self-grading"], ids=lambda value: ""
)
def test_self_grading_earns_nothing_even_where_no_protection_is_there(program, truth):
    run = functools.partial(launcher.run_program, guards=Guards())
    assert code(response(program), truth, time_s=4.0, memory_bytes=2**29, runner=run).score == 0.0


ORDINARY = {
    "a temporary file": "import tempfile\nwith tempfile.TemporaryFile('w+') as f:\n    f.write('ok')\n    f.seek(0)\n"
    "    print(f.read())",
    "the null device": "import os, sys\nprint('x', file=open(os.devnull, 'w'))\nprint('ok')",
    "files in its folder": "import os, shutil\nos.mkdir('d')\nopen('d/x', 'w').write('ok')\nos.rename('d/x', 'y')\n"
    "shutil.rmtree('d')\nprint(open('y').read())",
    "an event loop": "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 'ok'\n"
    "print(asyncio.run(main()))",
    "threads": "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n"
    "    print(*pool.map(str, ['ok']))",
    "a deep recursion": "import sys, threading\nsys.setrecursionlimit(10**5)\nthreading.stack_size(2**26)\n"
    "def go(n):\n    return 'ok' if n == 0 else go(n - 1)\nt = threading.Thread(target=lambda: print(go(5 * 10**4)))\n"
    "t.start()\nt.join()",
    "open(0)": "print(open(0).read().strip())",
    "stdin as bytes": "import sys\nprint(sys.stdin.buffer.readline().decode())",
    "os.read": "import os\nprint(os.read(0, 99).decode().strip())",
    "exit": "print('ok')\nexit()",
    "the standard library": "import collections, csv, datetime, decimal, fractions, heapq, itertools, json, math\n"
    "import random, re, sqlite3, statistics, typing, zoneinfo\nsqlite3.connect(':memory:').execute('select 1')\n"
    "random.seed()\nprint('ok', end='')",
    "a main guard": "def main():\n    print(input())\nif __name__ == '__main__':\n    main()",
    "a signal to itself": "import signal\nsignal.signal(signal.SIGALRM, lambda *_: print('ok'))\n"
    "signal.raise_signal(signal.SIGALRM)",
    "a database in a file": "import sqlite3\nwith sqlite3.connect('x.db') as db:\n"
    "    db.execute('create table t (a)')\n    db.execute('insert into t values (?)', ('ok',))\n"
    "print(sqlite3.connect('x.db').execute('select a from t').fetchone()[0])",
    "a locked file": "import fcntl\nwith open('x', 'w+') as f:\n    fcntl.lockf(f, fcntl.LOCK_EX)\n    f.write('ok')\n"
    "    f.seek(0)\n    print(f.read())\n    fcntl.lockf(f, fcntl.LOCK_UN)",
    "a mailbox": "import mailbox\nbox = mailbox.mbox('m')\nbox.lock()\nbox.add('x')\nbox.close()\nprint('ok')",
    "a pair of sockets": "import asyncio, socket\nasync def main():\n    a, b = socket.socketpair()\n"
    "    reader, one = await asyncio.open_connection(sock=a)\n"
    "    other, writer = await asyncio.open_connection(sock=b)\n"
    "    writer.write(b'ok\\n')\n    return (await reader.readline()).decode()\nprint(asyncio.run(main()))",
    "dataclasses and pickle": "import dataclasses, pickle\n@dataclasses.dataclass\nclass P:\n    x: str\n"
    "print(pickle.loads(pickle.dumps(P('ok'))).x)",
}


@pytest.mark.parametrize("without", ["", "namespaces"])
@pytest.mark.parametrize("program", ORDINARY.values(), ids=ORDINARY)
def test_ordinary_programs_work(program, without):
    guards = choice.probe(frozenset(filter(None, [without])))
    ran = launcher.run_program(program, guards=guards, time_s=60, memory_bytes=2**30, stdin="ok\n")
    assert (ran.status, ran.printed.strip()) == (0, "ok"), ran.errors


@contextlib.contextmanager
def two_sides(**names):
    """A program's end, which serves in a thread, and the end of its tests."""
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    program = peer.ProgramSide(asked, answers, names.__getitem__)
    serving = threading.Thread(target=program.serve)
    serving.start()
    tests = peer.TestsSide(answered, asks)
    with contextlib.closing(program._in), contextlib.closing(tests._in):
        try:
            assert tests.wait()
            yield tests
        finally:
            os.close(asks)  # ends the thread
            serving.join()
            os.close(answers)


def test_an_error_that_cannot_be_looked_at_is_described_without_its_parts():
    class Raises(Exception):
        def __str__(self):
            raise SystemExit(0)

    def fails():
        raise Raises(1)

    with two_sides(fails=fails) as tests, pytest.raises(Exception, match=r"^$") as caught:
        tests.ask("name", "fails")()
    assert (type(caught.value).__name__, caught.value.args) == ("Raises", ())


def test_an_object_of_a_program_gives_no_verdict_unless_the_tests_made_it():
    class Judge:
        size = 3

        def startswith(self, _):
            return True

        def __contains__(self, _):
            return True

        def __eq__(self, _):
            return True

    with two_sides(Judge=Judge) as tests:
        judge = tests.ask("name", "Judge")()
        with pytest.raises(TypeError):
            judge.startswith("a")
        with pytest.raises(TypeError):
            assert 3 in judge
        for undecided in (lambda: judge - 1, lambda: judge == 3, lambda: {judge}, lambda: judge < judge):
            with pytest.raises(peer.Undecided):
                undecided()
        assert judge.size == 3 and judge == judge
        assert tests.get_open(judge, "startswith")("a") is True and tests.has(3, judge) is True


def test_what_tests_see_of_an_object_stays_until_their_next_call():
    class Changes:
        looks = 0

        @property
        def x(self):
            Changes.looks += 1
            return Changes.looks

        def __iter__(self):
            return iter(["a", self.x])

    class Short(list):
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([])

    class Empty:
        def __len__(self):
            return 3

        def __iter__(self):
            return iter([])

    with two_sides(Changes=Changes, call=lambda: None, Short=Short, Empty=Empty) as tests:
        changes = tests.ask("name", "Changes")()
        assert changes.x == 1 and list(changes) == ["a", 2]
        for look in (lambda: changes.x, lambda: list(changes)):
            with pytest.raises(peer.Undecided, match="changes without a call"):
                look()
        tests.ask("name", "call")()
        assert changes.x == 5
        for name in ("Short", "Empty"):
            with pytest.raises(peer.Undecided, match="the length of an object is not the number of its items"):
                list(tests.ask("name", name)())


@pytest.mark.parametrize(
    "value", ["text", b"bytes", {1}, frozenset([1]), (1, 2), [1, 2], {1: 2}, 3, 2.5, 1j, bytearray(b"x")]
)
def test_an_object_whose_class_replaces_methods_of_plain_data_is_no_such_data(value):
    def lies(*_):
        return "lie"

    names = ("__iter__", "__float__", "__str__", "__getitem__", "__int__", "__eq__", "__index__")
    lying = type("Lying", (type(value),), dict.fromkeys(names, lies) | {"__hash__": lambda _: 0, "items": lies})
    with two_sides(make=lambda: lying(value)) as tests:
        made = tests.ask("name", "make")()
        assert not isinstance(made, type(value)) and type(made).__name__ == "Lying"
        with pytest.raises(peer.Undecided):
            assert made == value


@pytest.mark.parametrize("value", ["text", b"bytes", frozenset([1]), (1, 2), 3, 2.5, 1j])
def test_an_object_whose_class_adds_methods_to_immutable_data_is_such_data(value):
    body = {"size": lambda _: 7, "__str__": lambda _: "shown", "__add__": lambda *_: "sum"}
    with two_sides(make=lambda: type("Wide", (type(value),), body)(value)) as tests:
        made = tests.ask("name", "make")()
        assert isinstance(made, type(value)) and made == value and hash(made) == hash(value)
        assert made.size() == 7 and str(made) == "shown" and type(made).__name__ == "Wide"
        with pytest.raises(peer.Undecided):
            made + value


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "get", "args": [0, "__globals__"], "heap": []},
        {"op": "call", "args": [1, ["tuple", []], ["@", 0]], "heap": [["dict", [], None, None]]},
        {"op": "call", "args": [-1, ["tuple", []], ["@", 0]], "heap": [["dict", [], None, None]]},
        {"op": "call", "args": [["name", "os", "_exit"], ["tuple", [1]], ["@", 0]], "heap": [["dict", [], None, None]]},
        {"op": "name", "args": ["eval"], "heap": []},
    ],
)
def test_a_program_can_ask_for_nothing_but_functions_that_it_was_given(request_):
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    tests = peer.TestsSide(answered, asks)
    tests.export(len)
    os.write(answers, json.dumps(request_).encode() + b"\n")
    with contextlib.closing(tests._in), pytest.raises(plain.Gone):
        tests.ask("name", "f")
    for fd in (asked, asks, answers):
        os.close(fd)


@pytest.mark.parametrize(
    "value",
    [
        ["name", "os", "system"], ["type", "type"], ["type", "eval"], ["exception", "eval"], ["module", "os"],
        ["shared", "operator", "attrgetter"], ["function", 0, "f", None, "", "", None, None], ["yours", 3],
        ["object", 1],
        ["Fraction", [1, 0]], ["scalar", ["V8", [1], [0]]], ["@", 0], {}, [], ["tuple", 3], ["int", "x"],
    ],
)  # fmt: skip
def test_a_reply_is_plain_data_or_a_reference(value):
    asked, asks = os.pipe()
    answered, answers = os.pipe()
    tests = peer.TestsSide(answered, asks)
    os.write(answers, json.dumps({"value": value, "heap": []}).encode() + b"\n")
    with contextlib.closing(tests._in), pytest.raises(plain.Gone):
        tests.ask("name", "f")
    for fd in (asked, asks, answers):
        os.close(fd)


def test_landlock_alone_refuses_connections_signals_and_files(tmp_path):
    """The other layers refuse the network and signals, too; here they are off."""
    abi = confine.landlock_abi()
    if abi < 4:
        pytest.skip(f"Landlock of ABI {abi} knows no TCP")
    program = f"""
import os, socket
from jppo.plugins.sandbox import confine, kernel
server = socket.create_server(("127.0.0.1", 0))
port = server.getsockname()[1]
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
confine.restrict(read=["/usr", "/lib"], write=[{str(tmp_path)!r}], devices=["/dev/null"])

def fault(action):
    try:
        action()
        return ""
    except OSError as e:
        return type(e).__name__

print(
    fault(lambda: socket.create_connection(("127.0.0.1", port))),
    fault(lambda: socket.create_server(("127.0.0.1", 0))),
    fault(lambda: os.kill({os.getpid()}, 0)) if {abi} >= 6 else "PermissionError",
    fault(lambda: open({str(tmp_path.parent / "outside")!r}, "w")),
    fault(lambda: open("/etc/passwd")),
    fault(lambda: open({str(tmp_path / "inside")!r}, "w")),
)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.stdout.split(" ") == ["PermissionError"] * 5 + ["\n"], ended.stderr
