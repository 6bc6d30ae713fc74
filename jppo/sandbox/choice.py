"""The sandbox that `reward.sandbox` selects: the kernel's protections that work here, or a service.

Protections are detected by running a program under them. `docs/security.md` has the table of their guarantees.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterator

from jppo.sandbox import confine, launcher, limits, seccomp, service
from jppo.sandbox.launcher import Guards

STRICT, BASIC, CONTAINER = "strict", "basic", "container"
_PROBE = "import bisect, json, random, threading\nt = threading.Thread(target=print, args=(1,))\nt.start()\nt.join()"
_HOARD = """
import os, time
for _ in range(6):  # files without names
    fd = os.open("x", os.O_CREAT | os.O_WRONLY)
    os.unlink("x")
    os.write(fd, bytes(15_000_000))
time.sleep(1)
"""
_PROBE_S, _PROBE_BYTES = 30.0, 2**30

Runner = Callable[..., launcher.Ran]  # as launcher.run, without its `guards`


def make_runner(mode: str = STRICT, url: str = "") -> Runner:
    """Makes the function that runs programs; ValueError if `strict` lacks a protection, or the service an address."""
    if mode == CONTAINER:
        return functools.partial(service.run, url=service.check_url(url))
    guards = probe()
    if mode == STRICT and (why := lacks(guards)):
        raise ValueError(
            f"reward.sandbox='strict': {why}; start where they are, set reward.sandbox=container with"
            " reward.sandbox_url, or, for a model that you trust, reward.sandbox=basic"
        )
    return functools.partial(launcher.run, guards=guards)


def describe_sandbox(mode: str, url: str = "") -> str:
    """Describes where programs run, and under which protections, for the start of a run's log."""
    if mode == CONTAINER:
        return f"sandbox: container, by {url}"
    guards = probe()
    lacking = lacks(guards)
    warning = f"; WARNING: programs are not contained: {lacking}" if mode == BASIC and lacking else ""
    return f"sandbox: {mode}, {summary(guards)}{warning}"


@functools.cache
def probe(without: Collection[str] = frozenset()) -> Guards:
    """Finds the strongest guards that work here; `without` names protections to treat as missing."""
    for guards in _candidates(frozenset(without)):
        try:
            ran = launcher.run(_PROBE, guards=guards, time_s=_PROBE_S, memory_bytes=_PROBE_BYTES)
        except (launcher.NoSandbox, OSError):
            continue
        if ran.status == 0 and ran.printed.strip() == "1":
            guards = guards if "folder quota" in without or guards.spaces != confine.NONE else _counted(guards)
            return guards if "cgroup" in without else _grouped(guards)
    return Guards()


def _counted(guards: Guards) -> Guards:
    """Adds the quota by the kernel's counter, where that stops a program."""
    counted = dataclasses.replace(guards, counted=True)
    try:
        ran = launcher.run(_HOARD, guards=counted, time_s=_PROBE_S, memory_bytes=_PROBE_BYTES)
    except (launcher.NoSandbox, OSError):
        return guards
    return counted if ran.why == limits.TOO_MUCH else guards


def _grouped(guards: Guards) -> Guards:
    """Adds control groups to the guards, where these can be made."""
    grouped = dataclasses.replace(guards, groups=limits.group_bases())
    try:
        ran = launcher.run("print(1)", guards=grouped, time_s=_PROBE_S, memory_bytes=_PROBE_BYTES)
    except (launcher.NoSandbox, OSError):
        return guards
    return grouped if ran.status == 0 else guards


def _candidates(without: Collection[str]) -> Iterator[Guards]:
    abi = 0 if "landlock" in without else confine.landlock_abi()
    filtered = "seccomp" not in without and seccomp.supported()
    nobody = [launcher.NOBODY, None] if os.geteuid() == 0 and "user" not in without else [None]
    places = [(confine.AS_ROOT, uid) for uid in nobody] if os.geteuid() == 0 else []
    places = [] if "namespaces" in without else [*places, (confine.AS_USER, None)]
    for files, calls in ((abi, filtered), (abi, False), (0, filtered), (0, False)):
        yield from (Guards(files, calls, how, uid) for how, uid in places)
        yield from (Guards(files, calls, confine.NONE, uid) for uid in nobody)


def describe_guards(guards: Guards) -> dict[str, str]:
    """Returns the state of each protection by its name in docs/security.md; '' is absent."""
    own = guards.spaces != confine.NONE
    return {
        "landlock": f"ABI {guards.landlock}" if guards.landlock else "",
        "seccomp": "on" if guards.seccomp else "",
        "namespaces": "on" if own else "",
        "folder quota": "tmpfs" if own else "counted" if guards.counted else "",
        "unprivileged user": str(guards.uid or os.geteuid() or ""),
        "rlimits": "on",
        "cgroup": "on" if guards.groups else "",
    }


def summary(guards: Guards) -> str:
    """Returns one line for logs."""
    found = describe_guards(guards)
    active = ", ".join(name if how == "on" else f"{name} ({how})" for name, how in found.items() if how)
    absent = ", ".join(name for name, how in found.items() if not how)
    return active + (f"; not here: {absent}" if absent else "")


def lacks(guards: Guards) -> str:
    """Returns why untrusted models' programs must not run under these guards, or ''."""
    found = []
    if not guards.landlock and guards.spaces == confine.NONE:
        found.append("neither Landlock (Linux 5.13) nor namespaces keep programs to their folder")
    if not guards.seccomp:
        found.append("no seccomp filter keeps them from the network and other processes")
    if not guards.counted and guards.spaces == confine.NONE:
        found.append("nothing bounds their files without namespaces, unless TMPDIR names a folder on a disk")
    return "; ".join(found)
