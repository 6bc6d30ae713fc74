"""Programs that try to grade themselves, to read, write or stay where they must not, or to use up the machine.

Each is (class, name, program, truth, scores that are right). Those with PROBE list in `f()` what succeeded, so that a
score of 1 says: it ran to its end, and nothing worked. OUT, PORT, VICTIM, ABSTRACT, CODE and WAYS (paths that programs
may read) are replaced before a run.
"""

PROBE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
done = []
def attempt(name, act):
    try:
        act()
    except BaseException:
        return
    done.append(name)
def system(name, number, *args):
    if libc.syscall(ctypes.c_long(number), *args) >= 0:
        done.append(name)
def long(x):
    return ctypes.c_long(x)
def f():
    return done
"""
NOTHING = "assert f() == []"
ASSERTS = "assert f(1) == 2\nassert f(2) == 3"
NEEDLE = "assert f(1) == 'needle-' + '471108'"
IO = '[{"input": "1 2", "output": "needle-471108"}]'
LATER = "\ndef f(): return []\n"

SELF_GRADING = {
    "prints a token and leaves": "import os, __main__\nos.write(1, str(vars(__main__)).encode())\nos._exit(0)",
    "replaces exec": "import builtins\nbuiltins.exec = builtins.eval = lambda *a, **k: True",
    "empties the tests": "import __main__\n__main__.tests = ''\n__main__.requests = []",
    "equal to everything": "class E:\n    def __eq__(s, o): return True\n    __ne__ = lambda s, o: False\n"
    "    __lt__ = __gt__ = __eq__\ndef f(x): return E()",
    "an int equal to everything": "class N(int):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
    "def f(x): return N(7)",
    "a list equal to everything": "class L(list):\n    def __eq__(s, o): return True\ndef f(x): return L()",
    "empties requests in its callers' frames": "import sys\nf = sys._getframe()\nwhile f:\n"
    "    for v in list(f.f_locals.values()):\n        if isinstance(v, list): v.clear()\n    f = f.f_back",
    "forges replies on every descriptor": "import os\nfor fd in range(64):\n    try: os.write(fd,"
    " b'{\"value\": true}\\n{\"value\": null}\\n{\"passed\": true, \"score\": 777.0}\\n')\n"
    "    except OSError: pass\nos._exit(0)",
    "forges as many replies as are wanted": "import os\nfor fd in range(64):\n    try: os.write(fd,"
    " b'{\"value\": {\"items\": []}}\\n{\"value\": {\"other\": \"x\"}}\\n')\n    except OSError: pass\nos._exit(0)",
    "replaces the encoder": "import json, sys\njson.dumps = lambda *a, **k: '{\"value\": true}'\n"
    "for m in list(sys.modules.values()):\n    if hasattr(m, 'plain'): m.plain = lambda *a: True",
    "leaves at the first call": "import os\ndef f(x): os._exit(0)",
    "leaves by atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef f(x): raise SystemExit(0)",
}  # fmt: skip
SEARCH = r"""
import gc, os, re, sys
def search():
    texts = [repr(o) for o in gc.get_objects() if isinstance(o, (str, list, dict, tuple)) and len(o) < 10**5]
    frame = sys._getframe()
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_globals.keys()))
        frame = frame.f_back
    texts += sys.argv + [repr(dict(os.environ))]
    for fd in range(64):
        try: texts.append(os.pread(fd, 10**6, 0).decode('latin-1'))
        except OSError: pass
    for path in ('/proc/self/cmdline', '/proc/self/mem', f'/proc/{os.getppid()}/cmdline'):
        try: texts.append(open(path, 'rb').read(10**6).decode('latin-1'))
        except (OSError, ValueError): pass
    for text in texts:
        found = re.search(r'needle-\d+', text)
        if found: return found.group()
"""

FILES = {
    "writes outside": PROBE + """
attempt("new file", lambda: open("OUT/new", "w"))
attempt("append", lambda: open("OUT/keep", "a").write("x"))
attempt("os.open", lambda: os.open("OUT/new2", os.O_CREAT | os.O_WRONLY))
attempt("emptied", lambda: os.open("OUT/keep", os.O_RDONLY | os.O_TRUNC))
attempt("truncate", lambda: os.truncate("OUT/keep", 0))
attempt("tmp", lambda: open("/tmp/jppo-owned", "w"))
attempt("shm", lambda: open("/dev/shm/jppo-owned", "w"))
attempt("var", lambda: open("/var/tmp/jppo-owned", "w"))
""",
    "changes what it cannot write": PROBE + """
attempt("chmod", lambda: os.chmod("OUT/keep", 0o777))
attempt("chown", lambda: os.chown("OUT/keep", os.getuid(), os.getgid()))
attempt("utime", lambda: os.utime("OUT/keep"))
attempt("xattr", lambda: os.setxattr("OUT/keep", "user.x", b"x"))
attempt("folder", lambda: os.chmod("OUT", 0o777))
""",
    "removes and renames": PROBE + """
attempt("remove", lambda: os.remove("OUT/keep"))
attempt("rename", lambda: os.rename("OUT/keep", "OUT/kept"))
attempt("move in", lambda: os.rename("OUT/keep", "keep"))
attempt("mkdir", lambda: os.mkdir("OUT/made"))
attempt("rmdir", lambda: os.rmdir("OUT/empty"))
attempt("fifo", lambda: os.mkfifo("OUT/fifo"))
attempt("node", lambda: os.mknod("null", 0o20666, os.makedev(1, 8)))
""",
    "links its way out": PROBE + """
os.symlink("OUT", "way")
attempt("by symlink", lambda: open("way/new", "w"))
attempt("read by symlink", lambda: open("way/secret").read())
os.symlink("OUT/keep", "direct")
attempt("append by symlink", lambda: open("direct", "a"))
attempt("hard link", lambda: os.link("OUT/keep", "hard"))
attempt("link out", lambda: os.link("program.py", "OUT/program"))
attempt("symlink out", lambda: os.symlink("/etc/passwd", "OUT/link"))
attempt("dots", lambda: open("../" * 20 + "OUT/secret".lstrip("/")).read())
""",
    "reads outside": PROBE + """
for path in ("OUT/secret", "/etc/passwd", "/etc/shadow", "/etc/hostname", "/root/.bashrc", "CODE"):
    attempt(path, lambda: open(path).read())
for path in ("OUT", "/tmp", "/proc", "/home", "/var"):
    # A folder above this Python or checkout is there, with the way to it alone.
    names = {way.removeprefix(path + "/").split("/")[0] for way in WAYS if way.startswith(path + "/")}
    attempt("list " + path, lambda: 1 / bool({*os.listdir(path)} - names or not names))
attempt("folder", lambda: os.open("OUT", os.O_RDONLY | os.O_DIRECTORY))
""",
    "reads by native code": PROBE + """
libc.open.restype = ctypes.c_int
if libc.open(b"OUT/secret", 0) >= 0: done.append("open")
if libc.fopen(b"OUT/new", b"w"): done.append("fopen")
system("openat", 257, long(-100), b"OUT/secret", long(0))
how = (ctypes.c_uint64 * 3)(0, 0, 0)
system("openat2", 437, long(-100), b"OUT/secret", ctypes.byref(how), long(24))
handle, where = (ctypes.c_uint32 * 40)(128), ctypes.c_int()
system("handle", 303, long(-100), b"OUT/secret", ctypes.byref(handle), ctypes.byref(where), long(0))
system("io_uring", 425, long(8), ctypes.byref((ctypes.c_uint8 * 120)()))
""",
    "tricks of /proc": PROBE + """
up = os.getppid()
for pid in {up, VICTIM, 1, "self"}:
    for name in ("environ", "mem", "maps", "cmdline", "root/OUT/secret", "cwd/secret", "status"):
        attempt(f"{pid}/{name}", lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
    attempt(f"{pid}/fd", lambda: os.listdir(f"/proc/{pid}/fd"))
    attempt(f"{pid}/cwd", lambda: os.readlink(f"/proc/{pid}/cwd") if pid != "self" else 1 / 0)
attempt("oom", lambda: open("/proc/self/oom_score_adj", "w").write("-500"))
attempt("sysrq", lambda: open("/proc/sys/kernel/hostname", "w"))
""",
    "leaves its root": PROBE + """
attempt("chroot", lambda: os.chroot("."))
os.mkdir("deep"); there = os.open(".", os.O_RDONLY)
attempt("chroot deep", lambda: os.chroot("deep"))
os.fchdir(there)
attempt("up", lambda: os.listdir("../../../../../../proc"))
attempt("up to a file", lambda: open("../" * 20 + "OUT/secret".lstrip("/")).read())
attempt("mount", lambda: 1 / (libc.mount(b"none", b"deep", b"tmpfs", 0, None) == 0))
attempt("bind", lambda: 1 / (libc.mount(b"/", b"deep", None, 4096, None) == 0))
system("pivot", 155, b".", b"deep")
""",
}  # fmt: skip

ENVIRONMENT = {
    "reads the environment": PROBE + """
attempt("key", lambda: os.environ["SOME_API_KEY"])
attempt("getenv", lambda: 1 / bool(libc.getenv(b"SOME_API_KEY")))
done += [name for name in os.environ if name not in
         ("PATH", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "HOME", "TMPDIR")]
environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, "environ")
i = 0
while environ[i]:
    if b"secret" in environ[i]: done.append("environ")
    i += 1
""",
    "looks at inherited descriptors": PROBE + """
import stat
for fd in range(3, 256):
    try: mode = os.fstat(fd).st_mode
    except OSError: continue
    if stat.S_ISSOCK(mode) or stat.S_ISREG(mode): done.append(fd)
    if stat.S_ISFIFO(mode):
        os.set_blocking(fd, False)
        attempt(f"read {fd}", lambda: os.read(fd, 1))
""",
}  # fmt: skip

PROCESSES = {
    "forks": PROBE + """
def fork():
    if os.fork() == 0: os._exit(0)
attempt("fork", fork)
if libc.fork() >= 0: done.append("libc")
system("fork", 57)
system("vfork", 58)
system("clone", 56, long(17), None)
system("clone3", 435, ctypes.byref((ctypes.c_uint64 * 11)(*[0] * 4, 17)), long(88))
attempt("spawn", lambda: os.posix_spawn("/bin/true", ["true"], {}))
""",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass\n",
    "starts programs": PROBE + """
import subprocess
attempt("run", lambda: subprocess.run(["touch", "OUT/new"], check=True))
attempt("python", lambda: subprocess.Popen([sys.executable, "-c", "open('OUT/new', 'w')"]))
attempt("system", lambda: 1 / (os.system("touch OUT/new") == 0))
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
import multiprocessing
attempt("multiprocessing", lambda: multiprocessing.Process(target=print).start())
""",
    "daemon": PROBE + """
def daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(0.3); open("OUT/daemon", "w"); time.sleep(4711.5)
        os._exit(0)
attempt("daemon", daemon)
attempt("session", os.setsid)
attempt("group", lambda: os.setpgid(0, 0))
""",
    "threads without end": "import threading, time\ntry:\n    while True: threading.Thread(target=time.sleep,"
    " args=(60,), daemon=True).start()\nexcept (RuntimeError, MemoryError): pass\n" + LATER,
    "a thread that outlives it": "import threading, time\nthreading.Thread(target=lambda: time.sleep(4711.5)).start()\n"
    + LATER,
}  # fmt: skip

RESOURCES = {
    "memory": "x = bytearray(10**10)" + LATER,
    "memory in pieces": "x = []\nwhile True: x.append(bytearray(10**6))" + LATER,
    "memory by mmap": PROBE + "import mmap\nattempt('mmap', lambda: mmap.mmap(-1, 2**31))",
    "memory outside of its address space": PROBE + """
attempt("memfd", lambda: os.memfd_create("x"))
if libc.shmget(0, 10**6, 0o1600) >= 0: done.append("shmget")
if libc.msgget(0, 0o1600) >= 0: done.append("msgget")
if libc.semget(0, 1, 0o1600) >= 0: done.append("semget")
system("mq", 240, b"jppo", long(0o102), long(0o600), None)
""",
    "a large file": PROBE + """
def fill():
    with open("large", "wb") as f:
        for _ in range(100): f.write(bytes(10**6))
attempt("fill", fill)
""",
    "many files of the allowed size": "for i in range(30):\n    with open(str(i), 'wb') as f:\n"
    "        for _ in range(16): f.write(bytes(10**6))\n" + LATER,
    "files without end": "import os\ni = 0\nwhile True:\n    os.mkdir(str(i))\n"
    "    open(f'{i}/x', 'w').write('x')\n    i += 1\n",
    "folders in each other, without rights": "import os\nos.umask(0o777)\nfor i in range(3000):\n    os.mkdir('d')\n"
    "    os.chdir('d')\n" + LATER,
    "limits that it raises": PROBE + """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):
    attempt(which, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY,) * 2))
    attempt(f"prlimit {which}", lambda: resource.prlimit(0, which, (resource.RLIM_INFINITY,) * 2))
attempt("files", lambda: [open("program.py") for _ in range(1000)] and 1)
""",
}  # fmt: skip

NETWORK = {
    "connects": PROBE + """
import socket
attempt("tcp", lambda: socket.create_connection(("127.0.0.1", PORT), 1))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", PORT)))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect("OUT/socket"))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0ABSTRACT"))
attempt("listen", lambda: socket.create_server(("127.0.0.1", 0)))
attempt("six", lambda: socket.socket(socket.AF_INET6))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
attempt("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW))
import urllib.request
attempt("http", lambda: urllib.request.urlopen("http://127.0.0.1:PORT/collective_rpc", timeout=1))
""",
    "connects by native code": PROBE + """
import struct
for family in (1, 2, 10, 16, 17, 40):
    if libc.socket(family, 1, 0) >= 0: done.append(family)
pair = (ctypes.c_int * 2)()
if libc.socketpair(1, 1, 0, pair) == 0:
    address = struct.pack("<H", 2) + struct.pack(">H", PORT) + bytes([127, 0, 0, 1]) + bytes(8)
    for fd in pair:
        if libc.connect(fd, address, 16) >= 0: done.append("connect")
""",
    "sends by pairs of sockets": PROBE + """
import array, socket
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET, socket.SOCK_RDM, socket.SOCK_STREAM):
    for flags in (0, socket.SOCK_CLOEXEC, socket.SOCK_NONBLOCK, socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK):
        for family in (socket.AF_UNIX, 30):
            pair = (ctypes.c_int * 2)()
            if libc.socketpair(family, int(kind) | flags, 0, pair) < 0: continue
            if kind != socket.SOCK_STREAM or family != socket.AF_UNIX: done.append(f"pair {kind} {family}")
            one = socket.socket(fileno=pair[0])
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
            for path in ("OUT/datagrams", "OUT/socket", "\\0ABSTRACT"):
                attempt("sendto", lambda: one.sendto(b"x", path))
                attempt("sendmsg", lambda: one.sendmsg([b"x"], rights, 0, path))
                attempt("connect", lambda: one.connect(path))
            attempt("descriptors", lambda: one.sendmsg([b"x"], rights))
""",
    "a system call of 32 bits": "import ctypes, mmap\ncode = mmap.mmap(-1, 4096, prot=7)\n"
    "code.write(bytes.fromhex('53b86801000031dbcd805bc3'))\n"  # int 0x80: socketpair
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()\ndef f(): return []",
    "a system call of x32": "import ctypes\nctypes.CDLL(None).syscall(0x40000000 | 53, 1, 2, 0, None)\n"
    "def f(): return []",
}  # fmt: skip

OTHERS = {
    "signals": PROBE + """
import signal
up = os.getppid()
for pid in {VICTIM, up or -1, -1, -VICTIM}:
    for sig in (0, signal.SIGUSR1, signal.SIGKILL):
        attempt(f"kill {pid} {sig}", lambda: os.kill(pid, sig))
attempt("group", lambda: os.killpg(os.getpgid(0), 0))
for number, args in ((200, (VICTIM, 9)), (234, (VICTIM, VICTIM, 9)), (434, (VICTIM, 0)), (129, (VICTIM, 9, None))):
    system(f"call {number}", number, *(long(a) if a is not None else None for a in args))
""",
    "signals by descriptors": PROBE + """
import fcntl
r, w = os.pipe()
attempt("owner", lambda: fcntl.fcntl(r, fcntl.F_SETOWN, VICTIM))
attempt("signal", lambda: fcntl.fcntl(r, fcntl.F_SETSIG, 9))
attempt("lease", lambda: fcntl.fcntl(r, 1024, 0))
attempt("other owner", lambda: fcntl.fcntl(r, 15, ctypes.string_at(ctypes.byref((ctypes.c_int * 2)(1, VICTIM)), 8)))
fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
os.write(w, b"x")
""",
    "slows others": PROBE + """
import resource
attempt("nice", lambda: os.setpriority(os.PRIO_PROCESS, VICTIM, 19))
attempt("all", lambda: os.setpriority(os.PRIO_USER, 0, 19))
attempt("affinity", lambda: os.sched_setaffinity(VICTIM, {0}))
attempt("scheduler", lambda: os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0)))
attempt("limits", lambda: resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1)))
""",
    "locks and leases": PROBE + """
import fcntl
library = open(os.__file__)
attempt("flock", lambda: fcntl.flock(library, fcntl.LOCK_EX | fcntl.LOCK_NB))
attempt("shared flock", lambda: fcntl.flock(library, fcntl.LOCK_SH))
attempt("read lease", lambda: fcntl.fcntl(library, 1024, fcntl.F_RDLCK))
attempt("lock of the description", lambda: fcntl.fcntl(library, 37, bytes(32)))
fcntl.lockf(library, fcntl.LOCK_SH)  # without effect
""",
    "takes what all users share": PROBE + """
context = ctypes.c_ulong()
system("asynchronous requests", 206, long(60000), ctypes.byref(context))
for name, number in (("sync", 162), ("syncfs", 306)): system(name, number, long(0))
r, w = os.pipe()
import fcntl
attempt("a large pipe", lambda: fcntl.fcntl(w, 1031, 2**20))
""",
    "traces": PROBE + """
for what in (16, 0x4206):
    if libc.ptrace(what, VICTIM, None, None) >= 0: done.append(what)
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
system("read", 310, long(VICTIM), vector, long(1), vector, long(1), long(0))
system("write", 311, long(VICTIM), vector, long(1), vector, long(1), long(0))
system("kcmp", 312, long(VICTIM), long(VICTIM), long(0), long(0), long(0))
attempt("mem", lambda: open("/proc/VICTIM/mem", "rb"))
""",
    "asks the kernel for more": PROBE + """
for flag in (0x20000, 0x10000000, 0x40000000, 0x20000000):
    if libc.unshare(flag) == 0: done.append(hex(flag))
for number, args in ((250, (0, -3, 1)), (248, (b"user", b"x", b"x", 1, -3)), (321, (0, None, 0)), (323, (0,)),
                     (298, (None, 0, -1, -1, 0)), (135, (0x0040000,)), (170, (b"owned", 5)), (308, (0, 0)),
                     (169, (0,)), (300, (0, 0)), (294, (0,))):
    system(f"call {number}", number, *(long(a) if isinstance(a, int) else a for a in args))
attempt("root", lambda: os.setuid(0) if os.getuid() else 1 / 0)
attempt("groups", lambda: os.setgroups([0]))
""",
    "switches the sandbox off": PROBE + """
import __main__, builtins, sys
for module in list(sys.modules.values()):
    if getattr(module, "__name__", "").startswith("jppo.plugins.sandbox"):
        for name, value in list(vars(module).items()):
            if isinstance(value, (list, tuple, dict)): setattr(module, name, type(value)())
__main__.refused = (); __main__.watch = None
libc.prctl(22, 0, None)
libc.prctl(38, 0, 0, 0, 0)
if libc.prctl(39, 0, 0, 0, 0) != 1: done.append("no_new_privs")
allow = (ctypes.c_uint16 * 4)(6, 0, 0, 0x7fff)
attempt("write", lambda: open("OUT/new", "w"))
attempt("read", lambda: open("OUT/secret"))
attempt("fork", os.fork)
if libc.socket(2, 1, 0) >= 0: done.append("socket")
""",
}  # fmt: skip

OUTPUTS = {
    "prints without end": "while True: print('x' * 10**6)",
    "prints errors without end": "import sys\nwhile True: sys.stderr.write('x' * 10**6)",
    "replies without end": "import os\nwhile True:\n    for fd in range(3, 32):\n"
    "        try: os.write(fd, b'{' * 10**6)\n        except OSError: pass",
    "a huge value": "def f(x=0): return 'x' * 50_000_000",
    "a nested value": "def f(x=0):\n    v = []\n    for _ in range(10**5): v = [v]\n    return v",
    "a value that grows": "import itertools\ndef f(x=0): return map(lambda i: 'x' * 1000, itertools.count())",
    "a reply of brackets": "import os\nfor fd in range(3, 32):\n    try: os.write(fd, b'[' * 10**6 + b'\\n')\n"
    "    except OSError: pass\nos._exit(0)",
}  # fmt: skip

LOOPS = {
    "loops": "while True: pass",
    "sleeps deaf": "import signal, time\nfor s in range(1, 32):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: time.sleep(4711.5)",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass",
    "closes its pipes and stays": "import os, time\nos.closerange(0, 64)\ntime.sleep(4711.5)",
    "crashes": "import ctypes\nctypes.string_at(1)",
}  # fmt: skip

CLASSES = {
    "files": FILES,
    "environment": ENVIRONMENT,
    "processes": PROCESSES,
    "resources": RESOURCES,
    "network": NETWORK,
    "others": OTHERS,
    "outputs": OUTPUTS,
    "loops": LOOPS,
}

PROGRAMS = [("self-grading", name, program, ASSERTS, {0.0}) for name, program in SELF_GRADING.items()]
PROGRAMS += [
    ("self-grading", "searches for the expected value", SEARCH + "def f(x): return search()", NEEDLE, {0.0}),
    ("self-grading", "searches for the expected output", SEARCH + "print(search())", IO, {0.0}),
]
PROGRAMS += [
    (group, name, program, NOTHING, {1.0} if program.startswith(PROBE) else {0.0, 1.0} if LATER in program else {0.0})
    for group, programs in CLASSES.items()
    for name, program in programs.items()
]
