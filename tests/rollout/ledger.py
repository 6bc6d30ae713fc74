"""The memory of one GPU as a file that processes share: who holds how much, and what was too much."""

import contextlib
import fcntl
import json
import os


class Ledger:
    """A card of `total` bytes; the file is made by the first `Ledger(path, total)`."""

    def __init__(self, path, total=None):
        self.path = path
        if total is not None:
            with open(path, "w") as file:
                json.dump({"total": total, "held": {}, "moments": [], "over": []}, file)

    @contextlib.contextmanager
    def _open(self):
        with open(self.path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            entries = json.load(file)
            for name in list(entries["held"]):
                if _ended(name.split("-")[-1]):
                    del entries["held"][name]
            yield entries
            file.seek(0)
            json.dump(entries, file)
            file.truncate()

    def hold(self, who, count, why):
        """Sets what this process holds; returns what is left."""
        with self._open() as entries:
            entries["held"][f"{who}-{os.getpid()}"] = count
            total = sum(entries["held"].values())
            entries["moments"].append([who, why, total])
            if total > entries["total"]:
                entries["over"].append([who, why, total])
            return entries["total"] - total

    def read(self):
        with self._open() as entries:
            return entries


def _ended(pid):
    """Whether a process is gone, or dead and not yet waited for: its memory is free."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
