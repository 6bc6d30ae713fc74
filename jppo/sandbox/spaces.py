"""Namespaces: a separate file tree, network, processes and IPC for the sandbox. Needs root or user namespaces."""

import os

from jppo.sandbox import kernel

AS_ROOT, AS_USER, NONE = "root", "user", "none"  # ways to make namespaces
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_MS_NOEXEC, _MS_NOATIME, _MS_NODIRATIME, _MS_RELATIME, _MNT_DETACH = 8, 1024, 2048, 1 << 21, 2
# Flags of a mount that a user namespace may not clear, as statvfs and mount spell them.
_LOCKED = {2: _MS_NOSUID, 4: _MS_NODEV, 8: _MS_NOEXEC, 1024: _MS_NOATIME, 2048: _MS_NODIRATIME, 4096: _MS_RELATIME}
_ROOT_BYTES = 2**20
HOME = "/box"  # the program's folder in its own file tree


def enter(how: str) -> None:
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


def build_tree(base: str, *, read: list[str], devices: list[str], size: int, owner: tuple[int, int]) -> None:
    """Makes a file tree the root of this process: `read` read-only, `devices`, and HOME of `size` bytes.

    `base` is an empty folder to mount on. HOME is a tmpfs of `owner`, and the working directory. Raises OSError.
    """
    kernel.mount("none", "/", "", _MS_REC | _MS_PRIVATE)
    quiet = _MS_NOSUID | _MS_NODEV
    kernel.mount("sandbox", base, "tmpfs", quiet, f"size={_ROOT_BYTES},nr_inodes=4096,mode=755")
    for path in read:
        _show(base, path)
    for path in devices:
        _show(base, path, read_only=False)
    os.mkdir(base + HOME)
    uid, gid = owner
    kernel.mount("box", base + HOME, "tmpfs", quiet, f"size={size},nr_inodes=4096,mode=700,uid={uid},gid={gid}")
    os.chdir(base)
    # Mounts the old root over the new one, then unmounts it: pivot_root(2).
    kernel.syscall(kernel.PIVOT_ROOT[kernel.MACHINE], b".", b".")
    kernel.unmount(".", _MNT_DETACH)
    kernel.mount("none", "/", "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | quiet)
    os.chdir(HOME)


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
