"""A headless Chromium for tests of pages, spoken to by the DevTools protocol over pipes.

Messages are JSON texts that end in a zero byte, on file descriptors 3 and 4 of the browser.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
MISSING = "no chromium here: install the distribution's package (apt-get install chromium)"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--mute-audio"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--disable-extensions", "--no-first-run", "--no-default-browser-check"),
    *("--remote-debugging-pipe", "--no-proxy-server"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SECONDS = 60.0
"""How long an answer may take."""


class Page:
    """A tab: what it asked for and what went wrong in it is kept.

    Attributes:
        errors: messages of errors and warnings in its console, and of exceptions.
        requests: addresses that it asked for.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser, self._session = browser, session
        self.errors: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return what it returns."""
        return self._browser.send(method, self._session, parameters)

    def open(self, path: Path) -> None:
        """Open a file, and wait until it is drawn."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")
        self.settle()

    def settle(self) -> None:
        """Wait until what was asked of the page is drawn."""
        twice = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
        self.send("Runtime.evaluate", expression=twice, awaitPromise=True)

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + SECONDS
        while not self.value(condition):
            assert time.monotonic() < until, f"{condition} did not come true in {SECONDS} s"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        found = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Give the page another size, as on another screen."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.settle()

    def prefer(self, scheme: str) -> None:
        """Prefer ``dark`` or ``light`` colours."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])
        self.settle()

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """Move, press, release or turn the wheel of the mouse."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as a PNG file."""
        shot = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def heard(self, method: str, parameters: dict[str, Any]) -> None:
        """Keep an event of the tab."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])


class Chromium:
    """A running browser."""

    def __init__(self, profile: Path) -> None:
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        # Moved out of the way of 3 and 4, as which the browser is to have them.
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (read, write)]
        self._process = subprocess.Popen(
            [
                *("bash", "-c", f'exec "$0" "$@" 3<&{high[0]} 4>&{high[1]}'),
                *(str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"),
            ],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (read, write, *high):
            os.close(end)
        self._buffer, self._count = b"", 0
        self._pages: dict[str, Page] = {}

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.send("Browser.close")
            self._process.wait(timeout=10)
        except (OSError, AssertionError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    @contextmanager
    def page(self) -> Iterator[Page]:
        """A new tab, closed at the end."""
        target = self.send("Target.createTarget", parameters={"url": "about:blank"})["targetId"]
        asked = {"targetId": target, "flatten": True}
        session = self.send("Target.attachToTarget", parameters=asked)["sessionId"]
        page = self._pages[session] = Page(self, session)
        yield page
        del self._pages[session]
        self.send("Target.closeTarget", parameters={"targetId": target})

    def send(
        self, method: str, session: str = "", parameters: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Call a method, hand on the events that come meanwhile, and return the answer."""
        self._count += 1
        call: dict[str, Any] = {"id": self._count, "method": method, "params": parameters or {}}
        if session:
            call["sessionId"] = session
        os.write(self._write, json.dumps(call).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._count:
                assert "error" not in message, f"{method}: {message['error']}"
                result: dict[str, Any] = message["result"]
                return result
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None and "method" in message:
                page.heard(message["method"], message["params"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], SECONDS)
            assert ready, f"chromium said nothing for {SECONDS} s"
            part = os.read(self._read, 1 << 20)
            assert part, "chromium ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message
