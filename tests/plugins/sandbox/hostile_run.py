"""Runs the hostile programs one after the other and prints what became of each, as JSON; with standard library only.

    python tests/plugins/sandbox/hostile_run.py UID WITHOUT OUT

UID runs them, if this is root; WITHOUT names protections to be taken for missing, separated by commas; OUT is a folder.
"""

import ctypes
import functools
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[3]))

from hostile_programs import NOTHING, PROGRAMS

from jppo.plugins.sandbox import choice, launcher
from jppo.plugins.sandbox import code as rule

PLACES = ("/tmp", "/dev/shm", "/var/tmp")


def main(uid, without, out):
    out = pathlib.Path(out)
    if os.geteuid() == 0 and uid:
        os.chown(out, uid, uid)
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: whose parent has ended is a child of this process
    os.environ |= {"SOME_API_KEY": "secret"}
    (out / "keep").write_text("keep")
    (out / "secret").write_text("secret")
    (out / "empty").mkdir()
    victim = subprocess.Popen(["sleep", "600"], env={"SOME_API_KEY": "secret"})
    try:
        with listeners(out) as (port, abstract, heard):
            guards = choice.probe(frozenset(filter(None, without.split(","))))
            runner = functools.partial(launcher.run_program, guards=guards)
            results = {}
            for group, name, program, truth, right in PROGRAMS:
                for old, new in (
                    ("OUT", str(out)),
                    ("PORT", str(port)),
                    ("VICTIM", str(victim.pid)),
                    ("ABSTRACT", abstract),
                    ("CODE", rule.__file__),
                    ("WAYS", repr(launcher.readable_paths())),
                ):
                    program = program.replace(old, new)
                before = state(out)
                started = time.monotonic()
                endless = truth == NOTHING and right == {0.0}  # a busy machine must not cut the others off
                score = grade(program, truth, runner, time_s=0.8 if endless else 8.0)
                took = time.monotonic() - started
                after = state(out)
                harm = [f"{key}: {before[key]} -> {after.get(key)}" for key in before if before[key] != after.get(key)]
                harm += [f"heard {what}" for what in heard]
                harm += ["the victim ended"] if victim.poll() is not None else []
                harm += [f"left {pid}" for pid in left()]
                harm += [f"took {took:.1f} s"] if took > 20 else []
                heard.clear()
                results[f"{group}: {name}"] = [score, harm]
    finally:
        victim.kill()
        victim.wait()
    print(json.dumps({"guards": choice.describe_guards(guards), "missing": choice.lacks(guards), "results": results}))


def grade(program, truth, runner, time_s):
    try:
        response = f"```python\n{program}\n```"
        return rule.code(response, truth, time_s=time_s, memory_bytes=2**28, runner=runner).score
    except Exception as e:
        return f"{type(e).__name__}: {e}"


def state(out):
    """All that programs must not change."""
    found = {}
    for path in (out, *sorted(out.rglob("*"))):
        at = path.lstat()
        data = path.read_bytes() if path.is_file() else None
        found[str(path)] = (at.st_mode, at.st_uid, at.st_mtime_ns, at.st_size, data, os.listxattr(path))
    names = {f"{place}/{name}" for place in PLACES for name in os.listdir(place)}
    mine = ("jppo-owned", f"jppo-code-{os.getpid()}-")  # other workers make and remove folders of their own meanwhile
    found["other folders"] = sorted(name for name in names if any(part in name for part in mine))
    found["the names in it"] = sorted(str(path) for path in out.rglob("*"))
    for kind in ("shm", "msg", "sem"):
        found[kind] = len(pathlib.Path(f"/proc/sysvipc/{kind}").read_text().splitlines())
    found["hostname"], found["null"] = socket.gethostname(), os.stat("/dev/null").st_mode
    return found


def left():
    """Processes of the sandbox that are still there when those that were killed have had time to go."""
    end = time.monotonic() + 5
    while (found := there()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def there():
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
            if b"jppo.plugins.sandbox.child" in command and b"-c" in command and descends(int(path.parent.name)):
                found.append(int(path.parent.name))
        except OSError:
            pass
    return found


def descends(pid):
    """Whether a process is of this run: others run programs of their own meanwhile."""
    while pid not in (0, os.getpid()):
        pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid != 0


class listeners:
    """Sockets that nobody may reach; `heard` grows by what came."""

    def __init__(self, out):
        abstract = f"jppo-hostile-{os.getpid()}"
        self.heard, self.open = [], True
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        for name in (str(out / "socket"), "\0" + abstract):
            self.sockets.append(socket.socket(socket.AF_UNIX))
            self.sockets[-1].bind(name)
            self.sockets[-1].listen()
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(str(out / "datagrams"))
        threading.Thread(target=self.receive, daemon=True).start()
        self.found = self.sockets[0].getsockname()[1], abstract, self.heard
        for one in self.sockets:
            threading.Thread(target=self.accept, args=(one,), daemon=True).start()

    def accept(self, one):
        while self.open:
            try:
                one.accept()
            except OSError:
                return
            self.heard.append(str(one.getsockname()))

    def receive(self):
        while self.open:
            self.datagrams.recv(99)
            self.heard.append("a datagram")

    def __enter__(self):
        return self.found

    def __exit__(self, *_):
        self.open = False
        for one in self.sockets:
            one.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
