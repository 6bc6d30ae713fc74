"""System calls without a wrapper in Python's standard library, by ctypes. A call that fails raises OSError."""

import ctypes
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long

X86_64, AARCH64 = "x86_64", "aarch64"
MACHINE = os.uname().machine

# Numbers that both architectures share.
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
SECCOMP = {X86_64: 317, AARCH64: 277}
PIVOT_ROOT = {X86_64: 155, AARCH64: 41}
CAPSET = {X86_64: 126, AARCH64: 91}
SETFSUID, SETFSGID = {X86_64: 122, AARCH64: 151}, {X86_64: 123, AARCH64: 152}

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000


def syscall(number: int, *args: object) -> int:
    returned = _LIBC.syscall(ctypes.c_long(number), *(ctypes.c_long(a) if isinstance(a, int) else a for a in args))
    return _checked(returned, f"syscall {number}")


def prctl(option: int, value: int) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    _checked(_LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    returned = _LIBC.mount(source.encode(), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(returned, f"mount on {target}")


def unmount(target: str, flags: int) -> None:
    _checked(_LIBC.umount2(os.fsencode(target), flags), f"umount {target}")


def drop_capabilities() -> None:
    """Drops every capability of this process, also for programs that it executes."""
    if MACHINE not in CAPSET:
        return
    for number in range(64):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:  # no such capability, or no right to drop it from the bounding set
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    syscall(CAPSET[MACHINE], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))


def clear_arguments() -> None:
    """Overwrites the arguments of this process, which every process can read in /proc."""
    with open("/proc/self/stat", encoding="utf-8") as f:
        fields = f.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)


def _checked(returned: int, call: str) -> int:
    if returned < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return int(returned)
