"""A browser without a window, driven through the W3C WebDriver protocol of its own driver."""

import base64
import contextlib
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the standard's key of a reference
MARK = "up to here"
KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004", "Space": " "}
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--window-size=1280,1000",
)  # fmt: skip


class Browser:
    """One window. Selectors are CSS."""

    def __init__(self, url: str, binary: str, profile: str) -> None:
        # A browser that starts takes a while; each call has a connection of its own.
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(base_url=url, timeout=120.0, limits=limits)
        options = {"binary": binary, "args": [*FLAGS, f"--user-data-dir={profile}"]}
        logs = {"browser": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.session = f"/session/{made['sessionId']}"
        self.command("Emulation.setScrollbarsHidden", hidden=True)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        response = self.http.request(method, path, json=body)
        assert response.status_code == 200, response.text
        return response.json()["value"]

    def _post(self, path: str, **body: Any) -> Any:
        return self._call("POST", f"{self.session}/{path}", body)

    def close(self) -> None:
        self._call("DELETE", self.session)
        self.http.close()

    def open(self, url: str) -> None:
        self._post("url", url=url)

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script, a function's body, returns."""
        return self._post("execute/sync", script=script, args=list(arguments))

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("goog/cdp/execute", cmd=name, params=parameters)

    def _find(self, selector: str) -> str:
        using = {"using": "css selector", "value": selector}
        return str(self._post("element", **using)[ELEMENT])

    def click(self, selector: str) -> None:
        self._post(f"element/{self._find(selector)}/click")

    def type(self, selector: str, text: str) -> None:
        """Keys into one element, behind what it holds."""
        self._post(f"element/{self._find(selector)}/value", text=text)

    def press(self, key: str) -> None:
        """One key, to whatever has the focus."""
        strokes = [{"type": kind, "value": KEYS[key]} for kind in ("keyDown", "keyUp")]
        self._post("actions", actions=[{"type": "key", "id": "keyboard", "actions": strokes}])

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def wait(self, script: str, *arguments: Any, seconds: float = 60.0) -> Any:
        """Run a script until its value is true; that value."""
        end = time.monotonic() + seconds
        while not (value := self.run(script, *arguments)):
            assert time.monotonic() < end, f"waited in vain for {script}"
            time.sleep(0.05)
        return value

    def log(self) -> list[str]:
        """What the browser's console got since the last call: errors, refused requests."""
        self.run("console.error(arguments[0])", MARK)  # what came before it is told before it
        found: list[str] = []
        end = time.monotonic() + 60
        while not any(MARK in message for message in found):
            assert time.monotonic() < end, f"the console says no more than {found}"
            found += [entry["message"] for entry in self._post("se/log", type="browser")]
        return [message for message in found if MARK not in message]

    def screenshot(self, file: Path) -> None:
        """The whole page as PNG."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))


def _programs() -> tuple[str, str]:
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no browser here: needs chromium and chromedriver (chromium-driver on Debian)")
    return browser, driver


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A fresh browser until the block ends; skips the test where there is none."""
    binary, driver = _programs()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [driver, "--port=0"],  # one that is free
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            one = Browser(f"http://127.0.0.1:{_port_of(process)}", binary, profile)
            yield one
            one.close()
        finally:
            process.terminate()
            process.communicate(timeout=60)


def _port_of(driver: "subprocess.Popen[str]") -> str:
    """Where it listens, as it tells once it does."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return found[1]
    raise AssertionError("the browser's driver did not start")
