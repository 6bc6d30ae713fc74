"""Confinement of a process by the kernel, for itself and its children: namespaces, Landlock, seccomp; and a quota.

Namespaces are a separate file tree, network, processes and IPC. They need root or user namespaces. Landlock restricts
file access by path, TCP and signals, without privileges (Linux 5.13).

The seccomp filter is permanent: one process with threads, without sockets (Linux 3.17). Refused system calls fail with
EPERM, so that Python raises PermissionError. Calls newer than the table fail with ENOSYS, so that libraries fall back
to an older one. Calls of another architecture end the process. Record locks succeed without effect: they exclude only
other processes, and on readable files a program must not exclude any.

A quota is for folders without a file system of their own: names, and bytes that the kernel counts. Names alone do not
bound a disk: a file without one takes space as long as it is open or mapped. So all bytes that the program ever writes
to files count, by write_bytes of /proc/PID/io: the kernel adds a page when it is first changed, by whatever call or
mapping. Only preallocation is not in it, which the filter refuses.
"""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from jppo.plugins.sandbox import kernel

AS_ROOT, AS_USER, NONE = "root", "user", "none"  # ways to make namespaces
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MS_NOEXEC, _MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME, _MNT_DETACH = 8, 1024, 2048, 1 << 21, 2
# Flags of a mount that a user namespace may not clear, as statvfs and mount spell them.
_LOCKED = {2: _MS_NOSUID, 4: _MS_NODEV, 8: _MS_NOEXEC, 1024: _MS_NOATIME, 2048: _MS_NODIRATIME, 4096: _MS_RELATIME}
_ROOT_BYTES = 2**20
HOME = "/box"  # the program's folder in its own file tree

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_READ = _READ_FILE | _READ_DIR
# Accesses that the kernel handles, by the ABI that introduced them.
_FILES_BY_ABI = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # then REFER, TRUNCATE, IOCTL_DEV
_MAKE_DEVICES = (1 << 6) | (1 << 9) | (1 << 11)  # MAKE_CHAR, MAKE_SOCK, MAKE_BLOCK: in no folder
_TCP = (1 << 0) | (1 << 1)  # bind and connect, ABI 4
_SCOPES = (1 << 0) | (1 << 1)  # abstract Unix sockets and signals, ABI 6
_ONLY_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | (1 << 14) | (1 << 15)
_VERSION_FLAG, _PATH_BENEATH = 1, 1

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
    # rules of its own, whose memory is the kernel's
    "landlock_create_ruleset": (444, 444), "landlock_add_rule": (445, 445), "landlock_restrict_self": (446, 446),
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
_PROGRAM_CALLS = ("fork", "vfork", "execve")
_FALLOCATE = {kernel.X86_64: 285, kernel.AARCH64: 47}
_FCNTL = (0, 1, 2, 3, 4, 5, 1030, 1032, 1033, 1034)  # F_DUPFD to F_GETLK, F_DUPFD_CLOEXEC, F_GETPIPE_SZ, seals
_F_SETLK, _F_SETLKW = 6, 7
_TIOCSTI, _FIOSETOWN, _SIOCSPGRP = 0x5412, 0x8901, 0x8902
_IOCTL = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # isatty, window size, FIONREAD to FIOCLEX
_AF_UNIX, _SOCK_STREAM, _OTHER_SOCKETS = 1, 1, 0xE  # the last: bits of all other types

_Step = tuple[int, int, int, int]  # code, jump if true, jump if false, operand

FOLDER_BYTES = 2**26
_FOLDER_FILES = 4096
TOO_MUCH = f"wrote more than {FOLDER_BYTES} bytes"


def enter_namespaces(spaces: str) -> None:
    """Moves this process to new namespaces, and its children to a new process namespace; raises OSError."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID
    if spaces == AS_ROOT:
        kernel.unshare(flags)
        return
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(flags | kernel.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as f:
            f.write(text)


def build_tree(
    base: str, *, read: list[str], devices: list[str], size: int, owner: tuple[int, int], programs: bool = False
) -> None:
    """Makes a file tree the root of this process: `read` read-only, `devices`, and HOME of `size` bytes.

    `base` is an empty folder to mount on. HOME is a tmpfs of `owner`, and the working directory. With `programs`, new
    files may be made anywhere in the tree, and /proc shows its processes. Raises OSError.
    """
    kernel.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    mount_flags = _MS_NOSUID | _MS_NODEV
    mode = "777" if programs else "755"
    kernel.mount("sandbox", base, "tmpfs", mount_flags, f"size={_ROOT_BYTES},nr_inodes=4096,mode={mode}")
    for path in read:
        _bind_into(base, path)
    for path in devices:
        _bind_into(base, path, read_only=False)
    if programs:
        _show_processes(base)
    os.mkdir(base + HOME)
    uid, gid = owner
    kernel.mount("box", base + HOME, "tmpfs", mount_flags, f"size={size},nr_inodes=4096,mode=700,uid={uid},gid={gid}")
    os.chdir(base)
    # Mounts the old root over the new one, then unmounts it: pivot_root(2).
    kernel.syscall(kernel.PIVOT_ROOT[kernel.MACHINE], b".", b".")
    kernel.unmount(".", _MNT_DETACH)
    if not programs:
        kernel.mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | mount_flags)
    os.chdir(HOME)


def _show_processes(base: str) -> None:
    """Adds /proc, if the kernel lets it, with the names of open files that shells use, and /tmp."""
    for folder in ("/proc", "/tmp"):
        os.makedirs(base + folder, exist_ok=True)  # /tmp is there if Python is installed below it
    os.chmod(f"{base}/tmp", 0o777)
    try:
        kernel.mount("proc", f"{base}/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError:
        return
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{base}/dev/{name}")


def _bind_into(base: str, path: str, *, read_only: bool = True) -> None:
    """Shows a path of the host at the same place below `base`, by a bind mount."""
    if not os.path.lexists(path) or os.path.lexists(base + path):
        return
    os.makedirs(os.path.dirname(base + path), exist_ok=True)
    if os.path.islink(path):  # such as /lib to usr/lib
        os.symlink(os.readlink(path), base + path)
        return
    if os.path.isdir(path):
        os.mkdir(base + path)
    else:
        os.close(os.open(base + path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, base + path, "", _MS_BIND | _MS_REC)
    if read_only:
        for mount in _mounts_below(base + path):
            flags = os.statvfs(mount).f_flag
            locked_flags = sum(flag for bit, flag in _LOCKED.items() if flags & bit)
            kernel.mount("none", mount, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | locked_flags)


def _mounts_below(path: str) -> list[str]:
    with open("/proc/self/mounts", "rb") as f:
        mounts = [os.fsdecode(line.split()[1].decode("unicode_escape").encode("latin-1")) for line in f]
    return [mount for mount in mounts if mount == path or mount.startswith(path + os.sep)]


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_abi() -> int:
    """Returns the version of the kernel's Landlock; 0 if there is none."""
    try:
        return kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, 0, 0, _VERSION_FLAG)
    except OSError:
        return 0


def restrict(*, read: list[str], write: list[str], devices: list[str], programs: bool = False) -> int:
    """Restricts this process to reading `read`, anything but devices below `write`, and reading and writing `devices`.

    With `programs`, what may be read may be executed. TCP (ABI 4) and signals to processes outside (ABI 6) are refused.
    Returns the ABI; raises OSError without one.
    Needs PR_SET_NO_NEW_PRIVS.
    """
    version = landlock_abi()
    handled_accesses = sum(bits for since, bits in _FILES_BY_ABI.items() if since <= version)
    rules = _Ruleset(handled_accesses, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    struct_bytes = 24 if version >= 6 else 16 if version >= 4 else 8
    execute = _EXECUTE if programs else 0
    ruleset = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(rules), struct_bytes, 0)
    try:
        for paths, access in (
            (read, _READ | execute),
            (write, handled_accesses & ~_MAKE_DEVICES & ~_EXECUTE | execute),
            (devices, _READ_FILE | _WRITE_FILE),
        ):
            for path in paths:
                _allow_path(ruleset, path, access & handled_accesses)
        kernel.syscall(kernel.LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return version


def _allow_path(ruleset: int, path: str, access: int) -> None:
    """Adds a rule to a Landlock ruleset: these accesses below a path."""
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # a path that this system does not have
        return
    try:
        if not stat.S_ISDIR(os.fstat(fd).st_mode):
            access &= _ONLY_FOR_FILES
        rule = _PathBeneath(access, fd)
        kernel.syscall(kernel.LANDLOCK_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(fd)


class _Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint16), ("true", ctypes.c_uint8), ("false", ctypes.c_uint8), ("k", ctypes.c_uint32)]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def filter_supported() -> bool:
    """Whether there is a table for this machine's system calls."""
    return kernel.MACHINE in _AUDIT_ARCH


def filter_calls(pid: int, *, counted: bool, programs: bool = False) -> None:
    """Installs the permanent filter for this process, whose id is `pid`. Needs PR_SET_NO_NEW_PRIVS.

    `counted`: without fallocate, which takes blocks that no counter has; libraries then write them.
    `programs`: it may start others, which have the filter, too.
    """
    code = build_filter(kernel.MACHINE, pid, counted=counted, programs=programs)
    instructions = (_Instruction * len(code))(*(_Instruction(*step) for step in code))
    program = _Program(len(code), ctypes.addressof(instructions))
    kernel.syscall(kernel.SECCOMP[kernel.MACHINE], 1, 0, ctypes.byref(program))  # SECCOMP_SET_MODE_FILTER


def build_filter(machine: str, pid: int, *, counted: bool = False, programs: bool = False) -> list[_Step]:
    """Builds the instructions of the seccomp filter for a machine."""
    machine_column = 0 if machine == kernel.X86_64 else 1
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
        if (number := numbers[machine_column]) is not None:
            rules = _call_rules("fork" if programs and name == "clone" else name, pid)
            block = [*rules, (_RETURN, 0, 0, _ALLOW)]
            code += [(_EQUAL, 0, len(block), number), *block]
    for name, refused in _REFUSED.items():
        if (number := refused[machine_column]) is not None and not (programs and name in _PROGRAM_CALLS):
            code += [(_EQUAL, 0, 1, number), _refuse(errno.EPERM)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _call_rules(name: str, pid: int) -> list[_Step]:
    """Returns the filter's instructions for the arguments of one system call."""
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
    if name in ("sendto", "prlimit64"):  # to the other end alone, without an address; reads limits of this process
        null = (_low(4), _high(4)) if name == "sendto" else (_low(0), _low(2), _high(2))
        return [step for load in null for step in (load, (_EQUAL, 1, 0, 0), _refuse(errno.EPERM))]
    if name == "fcntl":  # neither leases nor signals to others
        locks = [step for lock in (_F_SETLK, _F_SETLKW) for step in ((_EQUAL, 0, 1, lock), _refuse(0))]
        return [_low(1), *locks, *_allow_only(_FCNTL, errno.EPERM)]
    if name == "ioctl":  # no allocation of blocks
        return [_low(1), *_refuse_values(_TIOCSTI, _FIOSETOWN, _SIOCSPGRP), *_allow_only(_IOCTL, errno.EOPNOTSUPP)]
    if name == "prctl":  # the program may not undo that it ends with its parent, nor become unreadable to it
        return [_low(0), *_refuse_values(kernel.PR_SET_PDEATHSIG, kernel.PR_SET_DUMPABLE)]
    # open and openat: before ABI 3, Landlock lets a file opened for reading be truncated
    flags = _low(1 if name == "open" else 2)
    return [flags, (_ANY_BIT, 2, 0, os.O_WRONLY | os.O_RDWR), (_ANY_BIT, 0, 1, os.O_TRUNC), _refuse(errno.EPERM)]


def _refuse_values(*values: int) -> list[_Step]:
    """Refuses these values of the loaded argument."""
    return [step for value in values for step in ((_EQUAL, 0, 1, value), _refuse(errno.EPERM))]


def _allow_only(values: Sequence[int], code: int) -> list[_Step]:
    """Refuses all other values of the loaded argument, with this error code."""
    return [*((_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)), _refuse(code)]


def _low(argument: int) -> _Step:
    """Loads the lower half of an argument of the system call."""
    return (_LOAD, 0, 0, _ARGS + 8 * argument)  # both architectures are little-endian


def _high(argument: int) -> _Step:
    """Loads the upper half of an argument of the system call."""
    return (_LOAD, 0, 0, _ARGS + 8 * argument + 4)


def _refuse(code: int) -> _Step:
    return (_RETURN, 0, 0, _ERRNO | code)


def excess(folder: str, pid: int, user: int | None, *, counted: bool) -> str:
    """Returns why process `pid`, of another `user` if not None, has too much in its folder, or ''."""
    used_bytes, files = 0, 0
    try:
        for folder_path, folders, names in os.walk(folder, onerror=_raise_unless_missing):
            files += len(folders) + len(names)
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    used_bytes += os.lstat(os.path.join(folder_path, name)).st_blocks * 512
            if used_bytes > FOLDER_BYTES or files > _FOLDER_FILES:
                return f"{TOO_MUCH} or {_FOLDER_FILES} files"
    except (OSError, RecursionError):
        return "made a folder that cannot be looked into"
    try:
        return TOO_MUCH if counted and _written_bytes(pid, user) > FOLDER_BYTES else ""
    except OSError:  # it starts or ends; in between it cannot hide the counter
        return ""


def _written_bytes(pid: int, user: int | None) -> int:
    """Returns the bytes that a process, of another `user` if not None, has written to files."""
    try:
        return _read_counter(str(pid))
    except PermissionError:  # root without CAP_SYS_PTRACE
        if user is None:
            raise
        from concurrent.futures import ThreadPoolExecutor  # here, because it would delay every program

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_read_counter_as, str(pid), user).result()


def _read_counter_as(pid: str, user: int) -> int:
    """Reads the counter as `user`, which this thread stays; others keep theirs."""
    for call in (kernel.SETFSGID, kernel.SETFSUID):
        kernel.syscall(call[kernel.MACHINE], user)
    return _read_counter(pid)


def _read_counter(process: str) -> int:
    """Reads the kernel's counter of the bytes that a process has written to files."""
    with open(f"/proc/{process}/io", encoding="ascii") as f:
        return int(f.read().partition("\nwrite_bytes:")[2].split()[0])


def _raise_unless_missing(e: OSError) -> None:
    if not isinstance(e, FileNotFoundError):  # removed meanwhile
        raise e
