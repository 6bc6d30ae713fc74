"""Landlock: file access by path, TCP and signals, restricted by an unprivileged process for itself (Linux 5.13)."""

import ctypes
import os
import stat

from jppo.sandbox import kernel

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _READ_FILE | _READ_DIR
# Accesses that the kernel handles, by the ABI that introduced them.
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # then REFER, TRUNCATE, IOCTL_DEV
_MAKE_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK: in no folder
_TCP = (1 << 0) | (1 << 1)  # bind and connect, ABI 4
_SCOPES = (1 << 0) | (1 << 1)  # abstract Unix sockets and signals, ABI 6
_ONLY_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)
_VERSION_FLAG, _PATH_BENEATH = 1, 1


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def abi() -> int:
    """Returns the version of the kernel's Landlock; 0 if there is none."""
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(*, read: list[str], write: list[str], devices: list[str]) -> int:
    """Restricts this process to reading `read`, anything but devices below `write`, and reading and writing `devices`.

    TCP (ABI 4) and signals to processes outside (ABI 6) are refused. Returns the ABI; raises OSError without one.
    Needs PR_SET_NO_NEW_PRIVS.
    """
    version = abi()
    handled = sum(bits for since, bits in _FILES_BY_ABI.items() if since <= version)
    rules = _Ruleset(handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for paths, access in (
            (read, _READ),
            (write, handled & ~_MAKE_DEVICES & ~_EXECUTE),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _allow(ruleset, path, access & handled)
        kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        there = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a path that this system does not have
        return
    try:
        if not stat.S_ISDIR(os.fstat(there).st_mode):
            access &= _ONLY_FOR_FILES
        rule = _PathBeneath(access, there)
        kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(there)
