"""A headless Chromium for tests, driven over a pipe by the DevTools protocol. No package is needed for it."""

import base64
import contextlib
import fcntl
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

NAMES = ("chromium", "chromium-browser", "google-chrome")
DEADLINE_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
# The browser reads from descriptor 3 and writes to 4.
PIPED = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The browser's path; None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab: what it was told, and what it said that it should not have."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._rest, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(self, path: pathlib.Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Opens a file at this size, with the pixels of a phone where it is narrow, and waits until it is drawn."""
        self.errors.clear()
        self.requests.clear()
        phone = width < 600
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1 + phone, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.documentElement?.dataset.drawn !== undefined")

    def ask(self, expression: str):
        """The value of an expression in the page; of a promise what it comes to."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until the expression is true."""
        end = time.monotonic() + DEADLINE_S
        while not self.ask(condition):
            assert time.monotonic() < end, f"{condition} is not true after {DEADLINE_S:g} s; errors: {self.errors}"
            time.sleep(0.02)

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        """A movement or a press at a place of the window."""
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str) -> None:
        """A key, down and up."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, file: pathlib.Path) -> bytes:
        """What the window shows, as PNG."""
        time.sleep(0.3)  # for what is drawn when it is seen
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))
        return file.read_bytes()

    def _call(self, method: str, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            said = self._next(method)
            if said.get("id") == self._number:
                assert "error" not in said, f"{method}: {said['error']}"
                return said["result"]
            self._note(said)

    def _next(self, method: str) -> dict:
        while b"\0" not in self._rest:
            assert select.select([self._from], [], [], DEADLINE_S)[0], f"{method}: no answer for {DEADLINE_S:g} s"
            got = os.read(self._from, 1 << 20)
            assert got, f"{method}: the browser has ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, said: dict) -> None:
        what, params = said.get("method"), said.get("params", {})
        if what == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif what == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"]))
        elif what == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif what == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


@contextlib.contextmanager
def browser(profile: pathlib.Path) -> Iterator[Page]:
    """A browser of its own, with its files in `profile`; nothing of it is left when the block ends."""
    read_theirs, write_ours = os.pipe()
    read_ours, write_theirs = os.pipe()
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read_theirs, write_theirs)]  # not 3 or 4, its own
    running = subprocess.Popen(
        [sys.executable, "-c", PIPED, *map(str, theirs), find() or "", *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    for fd in (read_theirs, write_theirs, *theirs):
        os.close(fd)
    try:
        yield Page(write_ours, read_ours)
    finally:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        os.close(write_ours)
        os.close(read_ours)
