"""The quota of a program's folder: files without names by every way to take blocks, and honest programs."""

import errno
import functools
import signal

import pytest

from jppo.plugins.sandbox import choice, launcher

TAKES = """
import ctypes, fcntl, itertools, mmap, os, struct, threading, time
libc = ctypes.CDLL(None, use_errno=True)
SIZE, taken, counting = 2**24 - 2**20, 0, threading.Lock()
names = itertools.count()  # no two threads open the same file, whose blocks would count twice
zeros = mmap.mmap(-1, SIZE)
zeros[:] = bytes([7]) * SIZE

def new(flags=0):
    name = str(next(names))
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | flags)
    os.unlink(name)
    return fd

def keep(fd):
    libc.mmap(None, ctypes.c_long(4096), 1, 2, fd, ctypes.c_long(0))  # the mapping keeps the file
    global taken
    with counting:
        taken += os.fstat(fd).st_blocks * 512
        os.write(1, b"%d\\n" % taken)
    os.close(fd)

def source():
    fd = new()
    os.write(fd, zeros)
    os.lseek(fd, 0, 0)
    return fd

try:
    for _ in range(200):
        WAY
except OSError as e:
    print(e, flush=True)
time.sleep(0.3)
"""
WAYS = {
    "written": "fd = new(); os.write(fd, zeros); keep(fd)",
    "a byte a page": "fd = new(); [os.pwrite(fd, b'x', at) for at in range(0, SIZE, 4096)]; keep(fd)",
    "allocated": "fd = new(); os.posix_fallocate(fd, 0, SIZE); keep(fd)",
    "fallocate": "fd = new(); refused = libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(SIZE))\n"
    "        if refused: raise OSError(ctypes.get_errno(), 'fallocate')\n        keep(fd)",
    "ioctl": "fd = new(); fcntl.ioctl(fd, 0x4030582A, struct.pack('hhqqI4I', 0, 0, 0, SIZE, 0, 0, 0, 0, 0)); keep(fd)",
    "mapped": "fd = new(); os.ftruncate(fd, SIZE); m = mmap.mmap(fd, SIZE); m[:] = zeros[:]; m.close(); keep(fd)",
    "tmpfile": "fd = os.open('.', os.O_TMPFILE | os.O_RDWR); os.write(fd, zeros); keep(fd)",
    "direct": "fd = new(os.O_DIRECT); os.write(fd, zeros); keep(fd)",
    "sendfile": "a = source(); fd = new(); os.sendfile(fd, a, 0, SIZE); os.close(a); keep(fd)",
    "copied": "a = source(); fd = new(); os.copy_file_range(a, fd, SIZE); os.close(a); keep(fd)",
    "spliced": "r, w = os.pipe(); os.set_blocking(w, False); fd = new()\n"
    "        [os.write(w, zeros[:65536]) + os.splice(r, fd, 65536) for _ in range(240)]\n"
    "        os.close(r); os.close(w); keep(fd)",
    "linked": "fd = os.open('name', os.O_CREAT | os.O_RDWR); os.link('name', 'b'); os.unlink('name')\n"
    "        os.write(fd, zeros); os.unlink('b'); keep(fd)",
    "renamed over": "fd = os.open('a', os.O_CREAT | os.O_RDWR); os.write(fd, zeros); os.rename('a', 'b'); keep(fd)",
    "many small ones": "small = [os.open(str(i), os.O_CREAT | os.O_RDWR) for i in range(60)]\n"
    "        for i, fd in enumerate(small): os.write(fd, zeros[: SIZE // 60]); os.unlink(str(i)); keep(fd)",
    "from all threads": "def one():\n            fd = new(); os.write(fd, zeros); keep(fd)\n"
    "        ts = [threading.Thread(target=one) for _ in range(8)]\n"
    "        for t in ts: t.start()\n        for t in ts: t.join()",
}
BY_FILE_SYSTEM = {"direct": errno.EINVAL, "tmpfile": errno.EOPNOTSUPP}  # errors of those that lack the way
QUOTA = 2**26
MOST = 8 * QUOTA  # what may have been written at the kill; before there was a bound, 3 GiB were


@functools.cache
def found(without: str) -> launcher.Guards:
    return choice.probe(frozenset(filter(None, [without])))


@pytest.mark.parametrize("without", ["", "namespaces"])
@pytest.mark.parametrize("way", WAYS)
def test_files_without_a_name_count(way, without):
    guards = found(without)
    ran = launcher.run_program(TAKES.replace("WAY", WAYS[way]), guards=guards, time_s=60, memory_bytes=2**29)
    taken = [int(line) for line in ran.printed.splitlines() if line.isdecimal()]
    if way == "ioctl" or (way == "fallocate" and guards.counted):
        assert (taken, ran.why, ran.status) == ([], "", 0) and f"[Errno {errno.EOPNOTSUPP}]" in ran.printed, ran
        return
    if way in BY_FILE_SYSTEM and f"[Errno {BY_FILE_SYSTEM[way]}]" in ran.printed and not taken:
        pytest.skip(f"the file system of the folder has no such way: {ran.printed}; set TMPDIR to another")
    assert taken or ran.why, ran
    assert max(taken, default=0) <= (MOST if ran.why else QUOTA), ran
    assert ran.why.startswith("wrote more than") or ran.status in (0, -signal.SIGBUS), ran


HONEST = {
    "a temporary file": "import tempfile\nfor _ in range(3):\n    with tempfile.TemporaryFile() as f:\n"
    "        f.write(bytes(10**7))\nprint('ok')",
    "allocated": "import os\nfd = os.open('a', os.O_CREAT | os.O_RDWR)\nos.posix_fallocate(fd, 0, 10**6)\n"
    "print('ok' if os.fstat(fd).st_size == 10**6 else '')",
    "a mapped file": "import mmap\nf = open('a', 'w+b')\nf.write(bytes(10**6))\nf.flush()\n"
    "m = mmap.mmap(f.fileno(), 0)\nm[7:9] = b'ok'\nm.flush()\nf.seek(7)\nprint(f.read(2).decode())",
    "a copy": "import shutil\nopen('a', 'w').write('ok')\nshutil.copyfile('a', 'b')\nprint(open('b').read())",
    "printed a lot": "for i in range(200_000):\n    print(i % 10, end='', flush=True)\nprint('\\nok')",
}


@pytest.mark.parametrize("without", ["", "namespaces"])
@pytest.mark.parametrize("program", HONEST.values(), ids=HONEST)
def test_honest_programs_are_below_the_quota(program, without):
    ran = launcher.run_program(program, guards=found(without), time_s=60, memory_bytes=2**29)
    assert (ran.status, ran.printed.strip().splitlines()[-1:]) == (0, ["ok"]), ran.errors
