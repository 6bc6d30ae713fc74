"""The sandboxed process: it restricts itself, then runs the program.

    python -I -S -c '...' JOB_FD: started by `launcher.py`, which writes the job to JOB_FD by marshal.

Where there are tests, this process becomes the program's, and a child of it the tests': the program's process never
reads them, and cannot look into the other one, which alone can send a verdict.
"""

import marshal
import os
import resource
import sys

from jppo.plugins.sandbox import confine, kernel, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# What Python imports here delays every program: no ast, json, re, typing or signal.
_SIGKILL, _SIGSTOP = 9, 19
FOLDER = "\x01"  # the program's folder, in a command
REPLIES_FD = 97
CLOSED = "closed"  # the first reply, before the program runs; missing if the sandbox could not be closed
_EXIT_NOT_CLOSED = 1


def main(job_fd: int) -> None:
    """Reads the job, closes the sandbox and runs the program; ends the process as the program does."""
    with os.fdopen(job_fd, "rb") as f:
        job = marshal.load(f)
    parent = os.getppid()
    limits = job["limits"]
    if job["tests"] is not None:  # before the sandbox is closed; its imports cost as much as the rest of the start
        from jppo.plugins.sandbox import marks, peer, reader  # noqa: F401
    try:
        home = _confine(limits, parent)
        if job["tests"] is None and "command" not in job:
            _install_filter(limits)
    except OSError as e:
        print(f"the sandbox could not be closed: {e}", file=sys.stderr, flush=True)
        os._exit(_EXIT_NOT_CLOSED)
    os.environ.update(HOME=home, TMPDIR=home)
    if "command" in job:
        _run_command(job, home)
    with open("program.py", "w", encoding="utf-8") as copy:
        copy.write(job["program"])
    sys.path[:] = job["path"]
    sys.argv = ["program.py"]
    program.write_all(job["replies"], CLOSED)
    if job["tests"] is None:
        os.close(job["replies"])
        program.run_as_main(job["program"])
    else:
        _run_with_tests(job, limits)


def _run_command(job: "dict[str, Any]", home: str) -> None:
    """Runs a program that starts others, until the last of them ends; ends this process as the program does."""

    def expand(text: str) -> str:
        return text.replace(FOLDER, home)

    for name, data in job["files"].items():
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        if not name.endswith("/"):
            with open(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o700), "wb") as f:
                f.write(data.replace(FOLDER.encode(), home.encode()))
    for name, target in job["links"].items():
        os.makedirs(os.path.dirname(name), exist_ok=True)
        os.symlink(target, name)
    program.write_all(job["replies"], CLOSED)
    program.write_all(job["replies"], home)
    os.dup2(job["replies"], REPLIES_FD, inheritable=True)
    os.close(job["replies"])
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    if (command_pid := os.fork()) == 0:
        _install_filter(job["limits"])
        environment = {name: expand(value) for name, value in job["environment"].items()}
        os.chdir(environment["PWD"])
        command = [expand(word) for word in job["command"]]
        os.execve(command[0], command, environment)
    os.close(REPLIES_FD)
    code = 0
    while True:
        try:
            ended_pid, status = os.wait()
        except ChildProcessError:
            os._exit(code)
        if ended_pid == command_pid:
            code = os.waitstatus_to_exitcode(status) & 0xFF


def _run_with_tests(job: "dict[str, Any]", limits: "dict[str, Any]") -> None:
    """Runs the program in this process and its tests in a child; only the child has the tests and can reply."""
    from jppo.plugins.sandbox import peer

    request_in, request_out = os.pipe()
    reply_in, reply_out = os.pipe()
    own_pid = os.getpid()
    if os.fork() == 0:
        os.close(request_in)
        os.close(reply_out)
        _die_with_parent(own_pid)
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)  # to the program, this process is as another user's
        with os.fdopen(job["tests"], encoding="utf-8") as f:
            tests = f.read()
        _install_filter(limits)
        os.write(request_out, b"\n")
        program.write_all(job["replies"], program.run_tests(tests, peer.TestsSide(reply_in, request_out)))
        os._exit(0)
    for fd in (request_out, reply_in, job["tests"], job["replies"]):
        os.close(fd)
    os.read(request_in, 1)  # the child cannot be looked into now
    _install_filter(limits)
    for name in [module for module in sys.modules if module.partition(".")[0] == "jppo"]:
        del sys.modules[name]  # a program that changes all modules changes none of the sandbox's
    program.answer_tests(
        job["program"], lambda look_up: peer.ProgramSide(request_in, reply_out, look_up), peer.Captured()
    )


def _install_filter(limits: "dict[str, Any]") -> None:
    """Installs the filter of system calls, after which no process can be made."""
    if limits["seccomp"]:
        confine.filter_calls(os.getpid(), counted=limits["counted"], programs=limits["programs"])


def _confine(limits: "dict[str, Any]", parent: int) -> str:
    """Confines this process: drops every right that the program must not have; returns the program's folder."""
    _die_with_parent(parent)
    for group in limits["groups"]:
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as f:
            f.write("0")
    os.umask(0o022)
    home, owner = limits["folder"], limits["uid"]
    spaces = limits["spaces"]
    if spaces != confine.NONE:
        confine.enter_namespaces(spaces)
        _become_child()
        confine.build_tree(
            limits["folder"],
            read=limits["read"],
            devices=limits["devices"],
            size=limits["folder_bytes"],
            owner=(os.geteuid(), os.getegid()) if owner is None else (owner, owner),
            programs=limits["programs"],
        )
        home = confine.HOME
    os.chdir(home)
    for name, value in limits["rlimits"].items():
        kind = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))
    os.umask(0o077)
    if owner is not None:
        os.setgroups([])
        os.setresgid(owner, owner, owner)
        os.setresuid(owner, owner, owner)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)  # a change of user has cleared it
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    if limits["counted"]:  # a change of user has hidden the counter from that user
        kernel.prctl(kernel.PR_SET_DUMPABLE, 1)
    if limits["landlock"]:
        write = [home, "/"] if limits["programs"] and spaces != confine.NONE else [home]  # the mount is private
        confine.restrict(read=limits["read"], write=write, devices=limits["devices"], programs=limits["programs"])
    return str(home)


def _die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; ends it if the parent has ended before."""
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(_EXIT_NOT_CLOSED)


def _become_child() -> None:
    """Continues in a child, the first of the process namespace; this process ends as the child does."""
    alive_read, alive_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(alive_write)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
        os.set_blocking(alive_read, False)
        try:
            parent_gone = os.read(alive_read, 1) == b""  # the parent ended before the signal was requested
        except BlockingIOError:
            parent_gone = False
        os.close(alive_read)
        if parent_gone:
            os._exit(_EXIT_NOT_CLOSED)
        return
    os.close(alive_read)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import signal

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (_SIGKILL, _SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
