"""The sandboxed process: it restricts itself, then runs the program.

    python -I -S -c '...' JOB_FD: started by `outside.py`, which writes the job to JOB_FD by marshal.

No secret gets here: the job is the program and the tests' requests to it.
"""

import marshal
import os
import resource
import sys

from jppo.rewards.sandbox import kernel, landlock, program, seccomp, spaces

# What Python imports here delays every program: no json, re, typing or signal.
_SIGKILL, _SIGSTOP = 9, 19
CLOSED = "closed"  # the first reply, before the program runs; missing if the sandbox could not be closed
_EXIT_NOT_CLOSED = 1


def main(job_fd: int) -> None:
    """Reads the job, closes the sandbox and runs the program; ends the process as the program does."""
    with os.fdopen(job_fd, "rb") as f:
        job = marshal.load(f)
    parent = os.getppid()
    try:
        home = _close(job["limits"], parent)
    except OSError as e:
        print(f"the sandbox could not be closed: {e}", file=sys.stderr, flush=True)
        os._exit(_EXIT_NOT_CLOSED)
    os.environ.update(HOME=home, TMPDIR=home)
    with open("program.py", "w", encoding="utf-8") as copy:
        copy.write(job["program"])
    sys.path[:] = job["path"]
    sys.argv = ["program.py"]
    replies = job["replies"]
    program.write_all(replies, CLOSED)
    program.run(job["program"], job["requests"], lambda line: program.write_all(replies, line))


def _close(limits: dict, parent: int) -> str:
    """Drops every right that the program must not have; returns its folder."""
    _die_with(parent)
    for group in limits["groups"]:
        with open(f"{group}/cgroup.procs", "w", encoding="ascii") as f:
            f.write("0")
    os.umask(0o022)
    home, owner = limits["folder"], limits["uid"]
    how = limits["spaces"]
    if how != spaces.NONE:
        spaces.enter(how)
        _become_child()
        spaces.build_tree(
            limits["folder"],
            read=limits["read"],
            devices=limits["devices"],
            size=limits["folder_bytes"],
            owner=(os.geteuid(), os.getegid()) if owner is None else (owner, owner),
        )
        home = spaces.HOME
    os.chdir(home)
    for which, value in limits["rlimits"].items():
        _limit(getattr(resource, which), value)
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
        landlock.restrict(read=limits["read"], write=[home], devices=limits["devices"])
    if limits["seccomp"]:
        seccomp.install(os.getpid(), counted=limits["counted"])
    return str(home)


def _die_with(parent: int) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        os._exit(_EXIT_NOT_CLOSED)


def _become_child() -> None:
    """Continues in a child, the first of the process namespace; this process ends as the child does."""
    alive, mine = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(mine)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, _SIGKILL)
        os.set_blocking(alive, False)
        try:
            gone = os.read(alive, 1) == b""  # the parent ended before the signal was requested
        except BlockingIOError:
            gone = False
        os.close(alive)
        if gone:
            os._exit(_EXIT_NOT_CLOSED)
        return
    os.close(alive)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import signal

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (_SIGKILL, _SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))
