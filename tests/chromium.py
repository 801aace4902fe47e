"""Drives a headless Chromium over its DevTools protocol: no driver, no download; `websockets` comes with Prefect."""

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 60.0


def find_chromium() -> str | None:
    """The browser of `ABLATION_TEST_CHROMIUM`, or of the path."""
    return os.environ.get("ABLATION_TEST_CHROMIUM") or next((p for n in NAMES if (p := shutil.which(n))), None)


class Page:
    """One tab: calls, and what it said meanwhile."""

    def __init__(self, socket: Any) -> None:
        self.socket, self.number = socket, 0
        self.said: list[str] = []
        """Console messages, exceptions and log entries (refused loads and policies among them)."""
        self.requests: list[str] = []
        self.loaded = False
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.socket.recv(timeout=60))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
            self.said.append(json.dumps(params)[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded = True

    def open(self, path: Path, width: int, height: int = 800, *, mobile: bool = False, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.loaded = False
        self.call("Page.navigate", url=path.absolute().as_uri())
        while not self.loaded:
            self._hear(json.loads(self.socket.recv(timeout=60)))

    def value(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, key: str) -> None:
        code = {"Tab": 9, "Enter": 13}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path, scale: float = 1.0) -> None:
        box = self.value("[innerWidth, innerHeight]")
        clip = {"x": self.value("scrollX"), "y": self.value("scrollY"), "width": box[0], "height": box[1]}
        found = self.call("Page.captureScreenshot", format="png", clip={**clip, "scale": scale})
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(program: str, profile: Path) -> Iterator[Page]:
    """Start the browser with a profile of its own, and end it."""
    args = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run",
            f"--user-data-dir={profile}", "--disable-background-networking", "--hide-scrollbars",
            "--disable-dev-shm-usage", "about:blank"]  # fmt: skip
    process = subprocess.Popen([program, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file, deadline = profile / "DevToolsActivePort", time.monotonic() + START_S
        while not port_file.is_file() or len(port_file.read_text().split()) < 2:
            assert process.poll() is None and time.monotonic() < deadline, "the browser did not start"
            time.sleep(0.1)
        port, path = port_file.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as root:
            root.send(json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}))
            while (answer := json.loads(root.recv(timeout=60))).get("id") != 1:
                pass
            target = answer["result"]["targetId"]
            with connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None) as socket:
                yield Page(socket)
    finally:
        process.terminate()
        process.wait(timeout=30)
