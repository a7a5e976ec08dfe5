"""A headless Chromium, driven through its debugging pipe: nothing but the standard library."""

import json
import os
import shlex
import shutil
import subprocess
from base64 import b64decode
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from select import select
from time import monotonic, sleep
from typing import Any

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_LIMIT_S = 60


class Browser:
    """One page; `problems` are its errors and refusals, `requests` what it asked for."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive, self._rest, self._count = send, receive, b"", 0
        self._session: dict[str, str] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters, **self._session}
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        end = monotonic() + _LIMIT_S
        while b"\0" not in self._rest:
            if not select([self._receive], [], [], max(0, end - monotonic()))[0]:
                raise TimeoutError("the browser says nothing")
            self._rest += os.read(self._receive, 1 << 20)
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, given: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.problems.append(details.get("exception", details).get("description", str(details)))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.problems.append(str([one.get("value") for one in given["args"]]))
        elif method == "Log.entryAdded":
            self.problems.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])

    def resize(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, fragment: str = "") -> float:
        """Open a page from disk; return the milliseconds until it was ready, by its own clock."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.resolve().as_uri()}{fragment}")
        return float(self.wait("document.documentElement?.dataset.ready"))

    def js(self, expression: str) -> Any:
        """Evaluate an expression, and what it promises."""
        found = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true, or of some other worth."""
        end = monotonic() + _LIMIT_S
        value = f"(found => found instanceof Node || found)({expression})"
        while not (found := self.js(value)):
            if monotonic() > end:
                raise TimeoutError(f"never: {expression}; {self.problems}")
            sleep(0.03)
        return found

    def texts(self, selector: str) -> list[str]:
        """Give the texts of elements, as they are seen."""
        return self.js(f"[...document.querySelectorAll({selector!r})].map(e => e.innerText.trim())")

    def click(self, selector: str) -> None:
        self.js(f"document.querySelector({selector!r}).click()")

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path) -> None:
        path.write_bytes(b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(folder: Path) -> Generator[Browser]:
    """Start Chromium; its profile is in the folder."""
    from_us, to_it = os.pipe()
    from_it, to_us = os.pipe()
    line = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
        "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars",
        f"--user-data-dir={folder}",
    ]  # fmt: skip

    # Its ends are 3 and 4. A shell moves them there: JAX warns of a fork, which preexec_fn needs.
    command = f"exec {shlex.join(line)} 3<&{from_us} 4>&{to_us}"
    process = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(from_us, to_us),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield Browser(to_it, from_it)
    finally:
        process.terminate()
        process.wait(timeout=20)
        for each in (from_us, to_it, from_it, to_us):
            os.close(each)
