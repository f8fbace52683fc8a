"""A headless Chromium, driven by its own protocol over two pipes.

Nothing is downloaded and nothing listens: the distribution's browser reads commands from its file
descriptor 3 and answers on 4 (https://chromedevtools.github.io/devtools-protocol/).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WIDE, NARROW = (1400, 900), (390, 800)
WITHOUT = "no Chromium is installed: `apt-get install chromium`"
LIMIT_S = 30
UNIT_BYTES = 1 << 16

KEYS = {
    "Tab": 9,
    "Enter": 13,
    "Escape": 27,
    " ": 32,
    "PageUp": 33,
    "PageDown": 34,
    "End": 35,
    "Home": 36,
    "ArrowLeft": 37,
    "ArrowUp": 38,
    "ArrowRight": 39,
    "ArrowDown": 40,
}
"""Keys by name, with the codes that the protocol wants besides."""

SHIFT = 8

LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(text), fcntl.F_DUPFD, 10) for text in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Puts the pipes where the browser looks for them, and becomes the browser."""


def find_browser() -> str | None:
    """The distribution's browser, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@contextmanager
def opened() -> Generator["Browser", None, None]:
    """A browser for the tests of a module."""
    program = find_browser()
    assert program is not None, "tests without a browser are skipped"
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        Browser(program, Path(folder)) as browser,
    ):
        yield browser


@contextmanager
def fresh(browser: "Browser") -> Generator["Browser", None, None]:
    """The tab as it was at first. Nothing that is done in it may be an error or need a network."""
    browser.messages.clear()
    browser.requests.clear()
    browser.size(*WIDE)
    browser.prefer()
    browser.point(1, 1)
    yield browser
    assert browser.messages == []
    assert browser.requests == []


class Browser:
    """One browser with one tab. `messages` is what its console said of errors, `requests` every
    address that it wanted, but for what a file or the text of an address holds itself.
    """

    def __init__(self, program: str, folder: Path) -> None:
        commands, self.commands = os.pipe()
        self.answers, answers = os.pipe()
        arguments = [
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-first-run",
            "--disable-gpu",
            "--disable-extensions",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder}",
        ]
        if os.geteuid() == 0:
            arguments.append("--no-sandbox")  # Chromium refuses its sandbox to root
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", LAUNCH, str(commands), str(answers), program, *arguments],
            pass_fds=(commands, answers),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder)},
        )
        os.close(commands)
        os.close(answers)
        self.buffer = b""
        self.number = 0
        self.session = ""
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.begin()

    def begin(self) -> None:
        """Opens the tab, and listens to what goes on in it."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer. Raises AssertionError when it is refused."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self) -> dict[str, Any]:
        """The next message. What it says of the console and the network is kept."""
        end_s = time.monotonic() + LIMIT_S
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0, end_s - time.monotonic()))
            assert ready, "the browser says nothing"
            part = os.read(self.answers, UNIT_BYTES)
            assert part, "the browser has ended"
            self.buffer += part
        first, _, self.buffer = self.buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self.note(message.get("method", ""), message.get("params", {}))
        return message

    def note(self, method: str, said: dict[str, Any]) -> None:
        """Keeps errors, and addresses of the network."""
        match method:
            case "Runtime.exceptionThrown":
                self.messages.append(str(said["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                self.messages.append(f"{said['type']}: {said['args']}")
            case "Log.entryAdded":
                self.messages.append(str(said["entry"]))
            case "Network.requestWillBeSent":
                address = said["request"]["url"]
                if not address.startswith(("file:", "data:", "about:")):
                    self.requests.append(address)
            case _:
                pass

    def open(self, file: Path, fragment: str = "") -> None:
        """Loads a file, and waits until its program has drawn it."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=file.absolute().as_uri() + fragment)
        self.wait("document.documentElement?.dataset.ready === 'true'")

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the tab; of a promise when it is kept."""
        answer = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until it is so."""
        end_s = time.monotonic() + LIMIT_S
        while not self.evaluate(expression):
            assert time.monotonic() < end_s, f"not so after {LIMIT_S} s: {expression}"

    def settle(self) -> None:
        """Until what was planned is drawn."""
        self.evaluate(
            "new Promise((go) => requestAnimationFrame(() => requestAnimationFrame(() => go(1))))"
        )

    def press(self, *names: str, shift: bool = False) -> None:
        """Presses keys, one after the other."""
        for name in names:
            code = KEYS.get(name, ord(name[0].upper()))
            text = {"text": "\r" if name == "Enter" else name} if name not in KEYS else {}
            if name in ("Enter", " "):
                text = {"text": "\r" if name == "Enter" else " "}
            common = {
                "key": name,
                "windowsVirtualKeyCode": code,
                "modifiers": SHIFT if shift else 0,
            }
            kind = "keyDown" if text else "rawKeyDown"
            self.send("Input.dispatchKeyEvent", type=kind, **common, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **common)
        self.settle()

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        """The mouse does something at a place."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """A click of the mouse's first button."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.point(x, y, kind, button="left", clickCount=1)
        self.settle()

    def size(self, width: int, height: int) -> None:
        """Gives the tab another size."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.settle()

    def prefer(self, **features: str) -> None:
        """What the person prefers, such as prefers_color_scheme="dark"."""
        wanted = [{"name": name.replace("_", "-"), "value": v} for name, v in features.items()]
        self.send("Emulation.setEmulatedMedia", features=wanted)
        self.settle()

    def picture(self, file: Path) -> None:
        """Keeps what is seen as a file."""
        data = self.send("Page.captureScreenshot")["data"]
        file.write_bytes(base64.b64decode(data))

    def accessible(self, wanted: Callable[[str], bool]) -> list[dict[str, Any]]:
        """What assistive technology is told: all nodes that have a wanted role."""
        nodes = self.send("Accessibility.getFullAXTree")["nodes"]
        found: list[dict[str, Any]] = []
        for node in nodes:
            role = node.get("role", {}).get("value", "")
            if not node.get("ignored") and wanted(role):
                found.append({"role": role, "name": node.get("name", {}).get("value", "")})
        return found

    def close(self) -> None:
        """Ends the browser."""
        self.process.terminate()
        self.process.wait(LIMIT_S)
        os.close(self.commands)
        os.close(self.answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
