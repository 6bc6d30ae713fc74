"""A permanent seccomp filter for a sandboxed program: one process with threads, without sockets (Linux 3.17).

Refused system calls fail with EPERM, so that Python raises PermissionError. Calls newer than the table fail
with ENOSYS, so that libraries fall back to an older one. Calls of another architecture end the process. Record locks
succeed without effect: they exclude only other processes, and on readable files a program must not exclude any.
"""

import ctypes
import errno
import os
from collections.abc import Sequence

from jppo.sandbox import kernel

# Numbers on x86_64 and aarch64; None where the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    # new processes and programs
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157),
    "setpgid": (109, 154), "uselib": (134, None),
    # network and communication between processes
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269), "flock": (73, 32),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "msgget": (68, 186),
    "msgsnd": (69, 189), "msgrcv": (70, 188), "msgctl": (71, 187), "semget": (64, 190), "semop": (65, 193),
    "semtimedop": (220, 192), "semctl": (66, 191), "mq_open": (240, 180), "mq_unlink": (241, 181),
    "mq_notify": (244, 184), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_setup": (206, 0), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    # the view of the file system, and calls that Landlock does not restrict
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "mknod": (133, None), "mknodat": (259, 33),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "chown": (92, None), "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "truncate": (76, 45), "inotify_init": (253, None),
    "inotify_init1": (294, 26), "inotify_add_watch": (254, 27), "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    # the system, and parts of the kernel with a history of vulnerabilities
    "unshare": (272, 97), "setns": (308, 268), "bpf": (321, 280), "userfaultfd": (323, 282),
    "perf_event_open": (298, 241), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "setrlimit": (160, 164), "personality": (135, 92), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "clock_adjtime": (305, 266), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None),
    "ioperm": (173, None), "modify_ldt": (154, None), "vhangup": (153, 58), "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42), "sysctl": (156, None), "vmsplice": (278, 75), "remap_file_pages": (216, 234),
    "sync": (162, 81), "syncfs": (306, 267),
}  # fmt: skip
_LAST_KNOWN = 450
_WITH_RULES: dict[str, tuple[int | None, int | None]] = {  # calls that are refused for some arguments
    "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129), "tgkill": (234, 131), "fcntl": (72, 25),
    "ioctl": (16, 29), "prlimit64": (302, 261), "prctl": (157, 167), "open": (2, None),
    "openat": (257, 56), "openat2": (437, 437), "socketpair": (53, 199), "sendto": (44, 206),
}  # fmt: skip
_AUDIT_ARCH = {kernel.X86_64: 0xC000003E, kernel.AARCH64: 0xC00000B7}
_X32_BIT = 0x40000000

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NR, _ARCH, _ARGS = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD = 0x00010000
_NEW_SPACES = 0x7E020080  # CLONE_NEWTIME to CLONE_NEWNET
_OF_PROGRAMS = ("fork", "vfork", "execve")
_FALLOCATE = {kernel.X86_64: 285, kernel.AARCH64: 47}
_FCNTL = (0, 1, 2, 3, 4, 5, 1030, 1032, 1033, 1034)  # F_DUPFD to F_GETLK, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, seals
_F_SETLK, _F_SETLKW = 6, 7
_TIOCSTI, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x8901, 0x8902
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, window size, FIONREAD to FIOCLEX
_AF_UNIX, _SOCK_STREAM, _OTHER_SOCKETS = 1, 1, 0xE  # the last: bits of all other types

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def supported() -> bool:
    """Whether there is a table for this machine's system calls."""
    return kernel.MACHINE in _AUDIT_ARCH


def install(pid: int, *, counted: bool, programs: bool = False) -> None:
    """Installs the permanent filter for this process, whose id is `pid`. Needs PR_SET_NO_NEW_PRIVS.

    `counted`: without fallocate, which takes blocks that `confine.py` does not see; libraries then write them.
    `programs`: it may start others, which have the filter, too.
    """
    code = build(kernel.MACHINE, pid, counted=counted, programs=programs)
    instructions = (_Instruction * len(code))(*(_Instruction(*one) for one in code))
    program = _Program(len(code), ctypes.addressof(instructions))
    kernel.syscall(kernel.SECCOMP[kernel.MACHINE], 1, 0, ctypes.byref(program))  # SECCOMP_SET_MODE_FILTER


def build(machine: str, pid: int, *, counted: bool = False, programs: bool = False) -> list[_Step]:
    """Builds the filter's instructions."""
    column = 0 if machine == kernel.X86_64 else 1
    code: list[_Step] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NR),
    ]
    if machine == kernel.X86_64:
        code += [(_ANY_BIT, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    code += [(_GREATER, 0, 1, _LAST_KNOWN), _refuse(errno.ENOSYS)]
    if counted:
        code += [(_EQUAL, 0, 1, _FALLOCATE[machine]), _refuse(errno.EOPNOTSUPP)]
    for name, numbers in _WITH_RULES.items():
        if (number := numbers[column]) is not None:
            rules = _rules("fork" if programs and name == "clone" else name, pid)
            block = [*rules, (_RETURN, 0, 0, _ALLOW)]
            code += [(_EQUAL, 0, len(block), number), *block]
    for name, refused in _REFUSED.items():
        if (number := refused[column]) is not None and not (programs and name in _OF_PROGRAMS):
            code += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _rules(name: str, pid: int) -> list[_Step]:
    if name == "clone":  # threads only
        return [_low(0), (_ANY_BIT, 1, 0, _CLONE_THREAD), _refuse(errno.EPERM)]
    if name == "fork":  # without new namespaces
        return [_low(0), (_ANY_BIT, 0, 1, _NEW_SPACES), _refuse(errno.EPERM)]
    if name in ("clone3", "openat2"):  # their flags are behind a pointer; libraries then fall back to the older call
        return [_refuse(errno.ENOSYS)]
    if name in ("kill", "tgkill"):  # this process alone
        return [_low(0), (_EQUAL, 1, 0, pid), _refuse(errno.EPERM)]
    if name == "socketpair":  # event loops need streams; a socket for datagrams could send to others
        stream = [(_ANY_BIT, 0, 1, _SOCK_STREAM), (_ANY_BIT, 0, 1, _OTHER_SOCKETS), _refuse(errno.EPERM)]
        return [_low(0), (_EQUAL, 1, 0, _AF_UNIX), _refuse(errno.EPERM), _low(1), *stream]
    if name == "sendto":  # to the other end alone, without an address
        return [one for half in (_low(4), _high(4)) for one in (half, (_EQUAL, 1, 0, 0), _refuse(errno.EPERM))]
    if name == "fcntl":  # neither leases nor signals to others
        locks = [one for lock in (_F_SETLK, _F_SETLKW) for one in ((_EQUAL, 0, 1, lock), _refuse(0))]
        return [_low(1), *locks, *_only(_FCNTL, errno.EPERM)]
    if name == "ioctl":  # no allocation of blocks
        return [_low(1), *_none_of(_TIOCSTI, _FIOSETOWN, _SIOCSPGRP), *_only(_IOCTL, errno.EOPNOTSUPP)]
    if name == "prctl":  # it ends with its parent, which reads what it writes
        return [_low(0), *_none_of(kernel.PR_SET_PDEATHSIG, kernel.PR_SET_DUMPABLE)]
    if name == "prlimit64":  # reads limits of this process
        read = [_low(0), (_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
        for half in (_low(2), _high(2)):
            read += [half, (_EQUAL, 1, 0, 0), _refuse(errno.EPERM)]
        return read
    # open and openat: before ABI 3, Landlock lets a file opened for reading be truncated
    flags = _low(1 if name == "open" else 2)
    return [flags, (_ANY_BIT, 2, 0, os.O_WRONLY | os.O_RDWR), (_ANY_BIT, 0, 1, os.O_TRUNC), _refuse(errno.EPERM)]


def _none_of(*values: int) -> list[_Step]:
    return [one for value in values for one in ((_EQUAL, 0, 1, value), _refuse(errno.EPERM))]


def _only(values: Sequence[int], code: int) -> list[_Step]:
    return [*((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)), _refuse(code)]


def _low(argument: int) -> _Step:
    return (_LOAD, 0, 0, _ARGS + 8 * argument)  # both architectures are little-endian


def _high(argument: int) -> _Step:
    return (_LOAD, 0, 0, _ARGS + 8 * argument + 4)


def _refuse(code: int) -> _Step:
    return (_RETURN, 0, 0, _ERRNO | code)
