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
                if not os.path.exists(f"/proc/{name.split('-')[-1]}"):  # its process has ended
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
