"""A headless Chromium that a test looks at pages with, over its debugging pipe.

Messages are JSON, ended by a zero byte: what the browser reads is its file 3, what it writes 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

__all__ = ["CHROMIUM", "Page", "chromium"]

CHROMIUM: Final = shutil.which("chromium") or shutil.which("chromium-browser")
"""None where there is none: `apt-get install chromium` on Debian."""
_ANSWER_S: Final = 60.0


class Page:
    """One page of one browser."""

    def __init__(self, write_fd: int, read_fd: int) -> None:
        self._write_fd, self._read_fd = write_fd, read_fd
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """What the page wrote to the console, and errors of its scripts."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        session = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Begin to load a page."""
        self._call("Page.navigate", url=url)

    def look(self, *, width: int, height: int = 900, is_dark: bool = False) -> None:
        """Set the size of the window, and which colours the reader prefers; motion is not."""
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        motion = {"name": "prefers-reduced-motion", "value": "reduce"}
        self._call("Emulation.setEmulatedMedia", features=[scheme, motion])

    def run(self, script: str) -> Any:
        """Return what an expression is worth in the page."""
        answer = self._call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Return once an expression is true in the page."""
        end = time.monotonic() + _ANSWER_S
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}; {self.messages}"
            # Two frames of the browser, not a guess at how long it takes.
            self.run(
                "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
            )

    def press(self, key: str) -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=codes[key],
                **(text if kind == "keyDown" else {}),
            )

    def picture(self, file: Path, *, is_whole: bool = False) -> None:
        """Write what is seen, or all of the page, as a PNG."""
        answer = self._call("Page.captureScreenshot", captureBeyondViewport=is_whole)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(answer["data"]))

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        kind, said = event.get("method"), event.get("params", {})
        if kind == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(said["exceptionDetails"])[:500])
        elif kind == "Runtime.consoleAPICalled":
            self.messages.append(json.dumps(said["args"])[:500])
        elif kind == "Log.entryAdded":
            self.messages.append(str(said["entry"]["text"])[:500])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read_fd], [], [], _ANSWER_S)
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read_fd, 1 << 20)
            assert chunk, "Chromium has ended"
            self._rest += chunk
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """Start a browser with a profile of its own; leaving ends it."""
    assert CHROMIUM is not None
    to_browser, from_us = os.pipe()
    to_us, from_browser = os.pipe()
    options = (
        "--headless=new --remote-debugging-pipe --no-sandbox --disable-gpu --no-first-run"
        " --disable-dev-shm-usage --disable-background-networking --disable-component-update"
        " --hide-scrollbars --force-color-profile=srgb --lang=en-GB"
    )
    # It reads from file 3 and writes to 4, whatever numbers the pipes have here.
    command = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, CHROMIUM, *options.split(), f"--user-data-dir={profile}"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Page(from_us, to_us)
    finally:
        process.terminate()
        process.wait(60)
        os.close(from_us)
        os.close(to_us)
