"""Becomes what root is in a container without CAP_SYS_ADMIN, as docker starts them, and runs a command.

    python tests/container.py COMMAND...

Its capabilities are docker's default ones, and a seccomp filter refuses unshare and mount as docker's does.
"""

import ctypes
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from jppo.plugins.sandbox import kernel

# CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, SETPCAP, NET_BIND_SERVICE, NET_RAW, SYS_CHROOT, MKNOD,
# AUDIT_WRITE, SETFCAP
KEPT = {0, 1, 3, 4, 5, 6, 7, 8, 10, 13, 18, 27, 29, 31}
REFUSED = {kernel.X86_64: (272, 165, 308, 161), kernel.AARCH64: (97, 40, 268, 51)}  # unshare, mount, setns, chroot


def enter():
    """Drops the rights of this process and its children."""
    for number in range(64):
        if number not in KEPT:
            try:
                kernel.prctl(kernel.PR_CAPBSET_DROP, number)
            except OSError:
                break
    low = sum(1 << number for number in KEPT)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kernel.syscall(kernel.CAPSET[kernel.MACHINE], header, (ctypes.c_uint32 * 6)(low, low, 0, 0, 0, 0))
    code = [(0x20, 0, 0, 0)]
    for number in REFUSED[kernel.MACHINE]:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    code.append((0x06, 0, 0, 0x7FFF0000))
    packed = b"".join(bytes(ctypes.c_uint16(c)) + bytes((t, f)) + bytes(ctypes.c_uint32(k)) for c, t, f, k in code)
    held = ctypes.create_string_buffer(packed)
    program = (ctypes.c_uint64 * 2)(len(code), ctypes.addressof(held))
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.syscall(kernel.SECCOMP[kernel.MACHINE], 1, 0, ctypes.byref(program))


if __name__ == "__main__":
    enter()
    os.execvp(sys.argv[1], sys.argv[1:])
