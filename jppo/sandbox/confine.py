"""Confinement of a process by the kernel, for itself and its children: namespaces, Landlock, and limits on resources.

Namespaces are a separate file tree, network, processes and IPC. They need root or user namespaces. Landlock restricts
file access by path, TCP and signals, without privileges (Linux 5.13).

Control groups limit memory and threads, where they can be made: version 2 needs a delegated group with the controllers
memory and pids, version 1 writable hierarchies of the two.

A quota is for folders without a file system of their own: names, and bytes that the kernel counts. Names alone do not
bound a disk: a file without one takes space as long as it is open or mapped. So all bytes that the program ever writes
to files count, by write_bytes of /proc/PID/io: the kernel adds a page when it is first changed, by whatever call or
mapping. Only preallocation is not in it, which `seccomp.py` refuses.
"""

import contextlib
import ctypes
import itertools
import os
import stat
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from jppo.sandbox import kernel

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


def enter_namespaces(how: str) -> None:
    """Moves this process to new namespaces, and its children to a new process namespace; raises OSError."""
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWPID
    if how == AS_ROOT:
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
    quiet = _MS_NOSUID | _MS_NODEV
    mode = "777" if programs else "755"
    kernel.mount("sandbox", base, "tmpfs", quiet, f"size={_ROOT_BYTES},nr_inodes=4096,mode={mode}")
    for path in read:
        _show(base, path)
    for path in devices:
        _show(base, path, read_only=False)
    if programs:
        _show_processes(base)
    os.mkdir(base + HOME)
    uid, gid = owner
    kernel.mount("box", base + HOME, "tmpfs", quiet, f"size={size},nr_inodes=4096,mode=700,uid={uid},gid={gid}")
    os.chdir(base)
    # Mounts the old root over the new one, then unmounts it: pivot_root(2).
    kernel.syscall(kernel.PIVOT_ROOT[kernel.MACHINE], b".", b".")
    kernel.unmount(".", _MNT_DETACH)
    if not programs:
        kernel.mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet)
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


def _show(base: str, path: str, *, read_only: bool = True) -> None:
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
        for place in _mounts_below(base + path):
            there = os.statvfs(place).f_flag
            kept = sum(flag for bit, flag in _LOCKED.items() if there & bit)
            kernel.mount("none", place, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | kept)


def _mounts_below(path: str) -> list[str]:
    with open("/proc/self/mounts", "rb") as f:
        places = [os.fsdecode(line.split()[1].decode("unicode_escape").encode("latin-1")) for line in f]
    return [place for place in places if place == path or place.startswith(path + os.sep)]


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
    handled = sum(bits for since, bits in _FILES_BY_ABI.items() if since <= version)
    rules = _Ruleset(handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    execute = _EXECUTE if programs else 0
    ruleset = kernel.syscall(kernel.LANDLOCK_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for paths, access in (
            (read, _READ | execute),
            (write, handled & ~_MAKE_DEVICES & ~_EXECUTE | execute),
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


FOLDER_BYTES = 2**26
FOLDER_FILES = 4096
TOO_MUCH = f"wrote more than {FOLDER_BYTES} bytes"
_MEMORY, _PIDS = ("memory.max", "memory.limit_in_bytes"), ("pids.max",)  # of either version
_NUMBERS = itertools.count()
_REMOVE_S = 1.0


def group_bases() -> tuple[str, ...]:
    """Returns the folders in which groups with a limit on memory or processes can be made, often none."""
    return tuple(base for base in _own() if _works(base))


def make_groups(bases: Iterable[str], *, memory: int, processes: int) -> list[str]:
    """Makes new groups, one in each base, with these limits. Raises OSError."""
    made = []
    for base in bases:
        group = f"{base}/jppo-{os.getpid()}-{next(_NUMBERS)}"
        os.mkdir(group)
        made.append(group)
        for names, value in ((_MEMORY, memory), (_PIDS, processes)):
            for name in names:
                if os.path.exists(f"{group}/{name}"):
                    _write(f"{group}/{name}", value)
    return made


def remove_groups(groups: Iterable[str]) -> None:
    """Kills remaining processes in groups and removes the groups; `group_bases` of a later run removes busy ones."""
    end = time.monotonic() + _REMOVE_S
    for group in groups:
        with contextlib.suppress(OSError):
            _write(f"{group}/cgroup.kill", 1)
        while os.path.isdir(group):
            try:
                os.rmdir(group)
            except OSError:
                if time.monotonic() > end:
                    break
                time.sleep(0.002)


def _write(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(str(value))


def _own() -> list[str]:
    """Returns this process's groups: version 2's, and version 1's of memory and pids."""
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as f:
            entries = [line.rstrip("\n").split(":", 2) for line in f]
        with open("/proc/self/mounts", encoding="utf-8") as f:
            mounts = [line.split() for line in f]
    except OSError:
        return []
    found = []
    for _, controllers, path in entries:
        wanted = set(controllers.split(",")) & {"memory", "pids"}
        for _, place, kind, options, *_ in mounts:
            first = kind == "cgroup" and wanted & set(options.split(","))
            if first or (kind == "cgroup2" and not controllers):
                found.append(f"{place}{path}".rstrip("/"))
    return list(dict.fromkeys(found))


def _works(base: str) -> bool:
    try:
        for name in os.listdir(base):  # of workers that were killed
            _, _, pid = name.partition("jppo-")
            if pid and not os.path.exists(f"/proc/{pid.partition('-')[0]}"):
                with contextlib.suppress(OSError):
                    os.rmdir(f"{base}/{name}")
        (group,) = make_groups([base], memory=2**28, processes=64)
    except OSError:
        return False
    try:
        return any(os.path.exists(f"{group}/{name}") for name in (*_MEMORY, *_PIDS))
    finally:
        remove_groups([group])


def excess(folder: str, pid: int, user: int | None, *, counted: bool) -> str:
    """Returns why process `pid`, of another `user` if not None, has too much in its folder, or ''."""
    size, files = 0, 0
    try:
        for where, folders, names in os.walk(folder, onerror=_raise):
            files += len(folders) + len(names)
            for name in (*folders, *names):
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(where, name)).st_blocks * 512
            if size > FOLDER_BYTES or files > FOLDER_FILES:
                return f"{TOO_MUCH} or {FOLDER_FILES} files"
    except (OSError, RecursionError):
        return "made a folder that cannot be looked into"
    try:
        return TOO_MUCH if counted and _written(pid, user) > FOLDER_BYTES else ""
    except OSError:  # it starts or ends; in between it cannot hide the counter
        return ""


def _written(pid: int, user: int | None) -> int:
    try:
        return _counted(str(pid))
    except PermissionError:  # root without CAP_SYS_PTRACE
        if user is None:
            raise
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(_counted_for, str(pid), user).result()


def _counted_for(pid: str, user: int) -> int:
    """Reads the counter as `user`, which this thread stays; others keep theirs."""
    for call in (kernel.SETFSGID, kernel.SETFSUID):
        kernel.syscall(call[kernel.MACHINE], user)
    return _counted(pid)


def _counted(process: str) -> int:
    with open(f"/proc/{process}/io", encoding="ascii") as f:
        return int(f.read().partition("\nwrite_bytes:")[2].split()[0])


def _raise(e: OSError) -> None:
    if not isinstance(e, FileNotFoundError):  # removed meanwhile
        raise e
