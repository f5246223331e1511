"""A headless Chromium, driven over its DevTools protocol: as little of it as the tests need."""

import base64
import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from scripts import setup_ui
from tests.servers.process import ServerProcess

READY_S = 60
ANSWER_S = 30
SHOWN_S = 20
_KEYS = {
    "Tab": ("Tab", 9, ""),
    "Enter": ("Enter", 13, "\r"),
    "Escape": ("Escape", 27, ""),
    " ": ("Space", 32, " "),
}
_SHIFT = 8


class Page:
    """One tab. What its console said and what it failed to load is in ``complaints``."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(ANSWER_S))
            if message.get("id") == number:
                assert "error" not in message, (method, message["error"])
                return message["result"]
            self._note(message)

    def open(self, url: str) -> None:
        """Go there; its script runs from now on."""
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def hasten(self, times: int) -> None:
        """Make the timers of what is opened from now on run so much faster."""
        script = f"const set = setTimeout; window.setTimeout = (f, ms) => set(f, ms / {times});"
        self.call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def size(self, width: int, height: int = 900) -> None:
        """The size of the window in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """What the person prefers: ``light`` or ``dark``. Nothing moves."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def js(self, expression: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + SHOWN_S
        while not self.js(f"Boolean({condition})"):
            assert time.monotonic() < end, f"never true: {condition}\n{self.text()}"
            time.sleep(0.05)

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key of the keyboard, or a character."""
        code, number, text = _KEYS.get(key, ("", 0, key))
        event = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        event["modifiers"] = _SHIFT if shift else 0
        down = {"text": text} if text else {}
        kind = "keyDown" if text else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, **event, **down)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def type(self, text: str) -> None:
        """A text, into what has the focus."""
        self.call("Input.insertText", text=text)

    def text(self) -> str:
        """What a person reads."""
        return str(self.js("document.body.innerText"))

    def picture(self, file: Path) -> None:
        """All of the page as PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(params["exceptionDetails"].get("text", "an exception"))
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] in _LOUD:
            self.complaints.append(str([a.get("value") for a in params["args"]]))
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] in _LOUD:
            self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")


Tab = Callable[[], AbstractContextManager[Page]]
_LOUD = ("error", "warning", "assert")


@contextmanager
def chromium(folder: Path) -> Iterator[Tab]:
    """A browser with a profile in ``folder``; what is yielded opens a tab of it."""
    found = setup_ui.browser()
    assert found, "no Chromium is installed: make setup-ui"
    profile = folder / "profile"
    port_file = profile / "DevToolsActivePort"
    process = ServerProcess(
        [
            found,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
            *(
                "--disable-default-apps",
                "--disable-extensions",
                "--disable-sync",
                "--disable-breakpad",
            ),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
        ],
        ready=lambda: port_file.exists() and port_file.read_text().count("\n") >= 1,
        folder=folder,
        log=folder / "chromium.log",
        ready_s=READY_S,
    )
    process.start()

    @contextmanager
    def tab() -> Iterator[Page]:
        port = int(port_file.read_text().split()[0])
        connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        connection.request("PUT", "/json/new?about:blank")
        address = json.loads(connection.getresponse().read())["webSocketDebuggerUrl"]
        connection.close()
        with connect(address, max_size=None, proxy=None, ping_interval=None) as socket:
            page = Page(socket)
            yield page
            page.call("Page.close")

    try:
        yield tab
    finally:
        process.kill()
