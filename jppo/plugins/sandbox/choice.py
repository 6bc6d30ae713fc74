"""The sandbox that `reward.sandbox` selects: the kernel's protections that work here, or an HTTP service.

Protections are detected by running a program under them. `docs/security.md` has the table of their guarantees. The
service has the interface of Sandbox Fusion: POST /run_code.
"""

import dataclasses
import functools
import http.client
import inspect
import ipaddress
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Collection, Iterator
from typing import Any

from jppo.plugins.sandbox import confine, handle, kernel, launcher, marks, peer, plain, program, reader
from jppo.plugins.sandbox.launcher import TOO_LONG, Guards, NoSandbox, Ran

STRICT, BASIC, CONTAINER = "strict", "basic", "container"
_PROBE = "import bisect, json, random, threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()"
_WRITE_TOO_MUCH = """
import os, time
for _ in range(6):  # files without names
    fd = os.open("x", os.O_CREAT | os.O_WRONLY)
    os.unlink("x")
    os.write(fd, bytes(15_000_000))
time.sleep(1)
"""
_PROBE_S, _PROBE_BYTES = 30.0, 2**30

Runner = Callable[..., launcher.Ran]  # as launcher.run_program, without its `guards`


def make_runner(mode: str = STRICT, url: str = "") -> Runner:
    """Makes the function that runs programs; ValueError if `strict` lacks a protection, or the service an address."""
    if mode == CONTAINER:
        return functools.partial(_run_by_service, url=_check_url(url))
    guards = probe()
    if mode == STRICT and (fault := lacks(guards)):
        raise ValueError(
            f"reward.sandbox='strict': {fault}; start where they are, set reward.sandbox=container with"
            " reward.sandbox_url, or, for a model that you trust, reward.sandbox=basic"
        )
    return functools.partial(launcher.run_program, guards=guards)


def describe_sandbox(mode: str, url: str = "") -> str:
    """Describes where programs run, and under which protections, for the start of a run's log."""
    if mode == CONTAINER:
        return f"sandbox: container, by {url}"
    guards = probe()
    fault = lacks(guards)
    warning = f"; WARNING: programs are not contained: {fault}" if mode == BASIC and fault else ""
    return f"sandbox: {mode}, {summary(guards)}{warning}"


@functools.cache
def probe(without: Collection[str] = frozenset()) -> Guards:
    """Finds the strongest guards that work here; `without` names protections to treat as missing."""
    for guards in _candidates(frozenset(without)):
        result = _try(_PROBE, guards)
        if result is None or result.status != 0 or result.printed.strip() != "1":
            continue
        if "folder quota" not in without and guards.spaces == confine.NONE:
            counted = dataclasses.replace(guards, counted=True)
            result = _try(_WRITE_TOO_MUCH, counted)
            guards = counted if result is not None and result.why == confine.TOO_MUCH else guards
        if "cgroup" not in without:
            grouped = dataclasses.replace(guards, groups=launcher.group_bases())
            result = _try("print(1)", grouped)
            guards = grouped if result is not None and result.status == 0 else guards
        return guards
    return Guards()


def _try(text: str, guards: Guards) -> Ran | None:
    """Runs a program under the guards; None if these cannot be made here."""
    try:
        return launcher.run_program(text, guards=guards, time_s=_PROBE_S, memory_bytes=_PROBE_BYTES)
    except (NoSandbox, OSError):
        return None


def _candidates(without: Collection[str]) -> Iterator[Guards]:
    """Yields combinations of guards, the strongest first; control groups and the counter are added later."""
    abi = 0 if "landlock" in without else confine.landlock_abi()
    can_filter = "seccomp" not in without and confine.filter_supported()
    users = [launcher.NOBODY, None] if os.geteuid() == 0 and "user" not in without else [None]
    namespaces = [(confine.AS_ROOT, uid) for uid in users] if os.geteuid() == 0 else []
    namespaces = [] if "namespaces" in without else [*namespaces, (confine.AS_USER, None)]
    for landlock, seccomp in ((abi, can_filter), (abi, False), (0, can_filter), (0, False)):
        yield from (Guards(landlock, seccomp, spaces, uid) for spaces, uid in namespaces)
        yield from (Guards(landlock, seccomp, confine.NONE, uid) for uid in users)


def describe_guards(guards: Guards) -> dict[str, str]:
    """Returns the state of each protection by its name in docs/security.md; '' is absent."""
    has_namespaces = guards.spaces != confine.NONE
    return {
        "landlock": f"ABI {guards.landlock}" if guards.landlock else "",
        "seccomp": "on" if guards.seccomp else "",
        "namespaces": "on" if has_namespaces else "",
        "folder quota": "tmpfs" if has_namespaces else "counted" if guards.counted else "",
        "unprivileged user": str(guards.uid or os.geteuid() or ""),
        "rlimits": "on",
        "cgroup": "on" if guards.groups else "",
    }


def summary(guards: Guards) -> str:
    """Describes the guards in one line, for logs."""
    states = describe_guards(guards)
    active = ", ".join(name if state == "on" else f"{name} ({state})" for name, state in states.items() if state)
    absent = ", ".join(name for name, state in states.items() if not state)
    return active + (f"; not here: {absent}" if absent else "")


def lacks(guards: Guards) -> str:
    """Returns why untrusted models' programs must not run under these guards, or ''."""
    missing = []
    if not guards.landlock and guards.spaces == confine.NONE:
        missing.append("neither Landlock (Linux 5.13) nor namespaces keep programs to their folder")
    if not guards.seccomp:
        missing.append("no seccomp filter keeps them from the network and other processes")
    if not guards.counted and guards.spaces == confine.NONE:
        missing.append("nothing bounds their files without namespaces, unless TMPDIR names a folder on a disk")
    return "; ".join(missing)


_RETRIES = 4
FIRST_WAIT_S, MARGIN_S = 0.5, 10.0  # before the first retry; time of a request on top of the program's
_RETRY_STATUS = (408, 429, 500, 502, 503, 504)
_SIDES = (kernel, plain, handle, peer, reader, marks, program)  # each imports only those before it
# Makes modules of their texts, in the process of the tests and in the program's.
_MODULES = """
import json, sys, types

def make_modules(sides):
    for name in ("jppo", "jppo.plugins", "jppo.plugins.sandbox"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = []
    for name, text in sides:
        sys.modules[name] = types.ModuleType(name)
        exec(compile(text, name, "exec"), vars(sys.modules[name]))
"""
# What follows in the process of the tests, whose standard output is the verdict, and in the program's. The tests' own
# file and arguments are removed first; the program's process, without capabilities, cannot look into theirs.
_TESTS = """
sides, text, tests, other = json.loads({job!r})
make_modules(sides)
import os
import subprocess
from jppo.plugins.sandbox import kernel
from jppo.plugins.sandbox.peer import TestsSide
from jppo.plugins.sandbox.program import run_tests, write_all

try:
    os.unlink(__file__)
except (OSError, NameError):
    pass
kernel.clear_arguments()
kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
asked, asks = os.pipe()
answered, answers = os.pipe()
command = [sys.executable, "-c", other, str(asked), str(answers)]
ends = dict(stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=(asked, answers))
running = subprocess.Popen(command, **ends)
running.stdin.write(json.dumps([sides, text]).encode())
running.stdin.close()
os.close(asked)
os.close(answers)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
verdict = run_tests(tests, TestsSide(answered, asks))
running.kill()
write_all(out, verdict)
os._exit(0)
"""
_PROGRAM = """
sides, text = json.load(sys.stdin)
make_modules(sides)
from jppo.plugins.sandbox import kernel
from jppo.plugins.sandbox.peer import Captured, ProgramSide
from jppo.plugins.sandbox.program import answer_tests

asked, answers = map(int, sys.argv[1:])
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.drop_capabilities()
kernel.prctl(kernel.PR_SET_PDEATHSIG, 9)  # a service that ends the tests for their time may not know of this process
answer_tests(text, lambda look_up: ProgramSide(asked, answers, look_up), Captured())
"""


def _check_url(url: str) -> str:
    """Returns the URL for programs; raises ValueError if it is invalid, or has a password in it."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"reward.sandbox_url={url!r} must be an address such as http://HOST:8080")
    if parts.username or parts.password:
        raise ValueError("reward.sandbox_url must not hold a user name or password; settings are printed and saved")
    return url if parts.path.rstrip("/").endswith("/run_code") else url.rstrip("/") + "/run_code"


def _run_by_service(
    text: str,
    *,
    url: str,
    time_s: float,
    memory_bytes: int,
    stdin: str = "",
    tests: str | None = None,
) -> Ran:
    """Like `launcher.run_program`, on the service. Raises NoSandbox after more than _RETRIES failures."""
    code = text
    if tests is not None:
        sides = [[module.__name__, inspect.getsource(module)] for module in _SIDES]
        code = _MODULES + _TESTS.format(job=json.dumps([sides, text, tests, _MODULES + _PROGRAM]))
    body = {
        "code": code,
        "language": "python",
        "stdin": stdin,
        "run_timeout": time_s,
        "compile_timeout": time_s,
        "memory_limit_MB": memory_bytes // 2**20,
    }
    for attempt in range(_RETRIES + 1):
        try:
            result = _parse_reply(_post(url, body, time_s + MARGIN_S), tests is not None)
            return dataclasses.replace(result, retries=attempt)
        except _TemporaryFailure as e:
            if attempt == _RETRIES:
                raise NoSandbox(f"the sandbox service failed {_RETRIES + 1} times; the last: {e}") from e
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("not reached")


class _TemporaryFailure(Exception):
    """A failure of the service that may pass."""


def _post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    handlers = [urllib.request.ProxyHandler({})] if _is_loopback(url) else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as reply:
            return json.loads(reply.read())
    except urllib.error.HTTPError as e:
        if e.code in _RETRY_STATUS:
            raise _TemporaryFailure(f"HTTP {e.code}") from e
        raise NoSandbox(f"the sandbox service answered HTTP {e.code}: {e.read(200).decode('utf-8', 'replace')}") from e
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as e:
        raise _TemporaryFailure(str(e)) from e


def _parse_reply(reply: Any, with_replies: bool) -> Ran:
    try:
        if reply["status"] == "SandboxError":
            raise _TemporaryFailure(str(reply.get("message"))[:200])
        result = reply["run_result"]
        timed_out = result["status"] == "TimeLimitExceeded"
        printed, errors = result.get("stdout") or "", result.get("stderr") or ""
        code = result.get("return_code")
        status = None if timed_out else 1 if code is None else int(code)
        replies = tuple(printed.splitlines()) if with_replies else ()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as e:
        raise _TemporaryFailure(f"a reply without status, run_result and its status: {str(reply)[:200]}") from e
    return Ran(status, "" if with_replies else printed, errors, replies, TOO_LONG if timed_out else "")


def _is_loopback(url: str) -> bool:
    host = urllib.parse.urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
