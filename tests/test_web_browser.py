"""The page in a real browser, against the served demo."""

import asyncio
import math
import os
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_browser import Browser, browser
from helpers_demo import TASKS, expected
from helpers_server import BASE, NAMES, make_fake_engine, serving
from helpers_wait import wait_for

from vexpert import demo
from vexpert.server.options import ServerOptions

pytest_plugins = ["helpers_demo_server"]
SCHEME = "prefers-color-scheme"
SHOTS = (("web-light", 1180, "light"), ("web-dark", 1180, "dark"), ("web-phone", 390, "light"))
ANSWERS = """
const cards = [...document.querySelectorAll("#answers article")];
if (cards.length !== arguments[0] || cards.some((one) => one.dataset.state !== "done")) return null;
const text = (one) => one.querySelector("pre").textContent;
return Object.fromEntries(cards.map((one) => [one.dataset.model, text(one)]));
"""
ROW = 'return document.querySelector(`#rows [data-adapter="${arguments[0]}"]`)?.textContent'
COUNT = "return document.querySelectorAll('#names input').length === arguments[0]"
STATE = 'return document.getElementById("status").dataset.state === arguments[0]'
STATUS = 'return document.getElementById("status").textContent === arguments[0]'
WANTS_KEY = "this server wants an API key"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as one:
        yield one


def leave(window: Browser) -> None:
    """Stop asking a server that ends now; forget what the console has noted of it."""
    window.open("about:blank")
    window.log()


@pytest.fixture
def page(window: Browser, url: str) -> Iterator[Browser]:
    """The page, loaded anew; at the end the console must hold no error."""
    window.open(url)
    window.wait(COUNT, 5)
    window.wait(STATE, "good")
    yield window
    assert window.log() == []


def test_one_word_to_five_names(page: Browser) -> None:
    page.type("#prompt", "hello")
    page.press("Enter")
    wanted = {name or BASE: expected(name, "hello") for name in TASKS}
    assert page.wait(ANSWERS, 5) == wanted
    for line in page.run(
        "return [...document.querySelectorAll('article')].map((one) => one.textContent)"
    ):
        # Letters and the end.
        assert re.search(r"\d tokens/s6 tokens, first after [\d,]+ ms$", line)


def test_an_adapter_is_loaded_asked_and_unloaded(page: Browser) -> None:
    page.type("#load-name", "back")
    page.type("#load-path", f"{demo.adapter_paths()['reverse']}")
    page.press("Enter")
    page.wait("return document.getElementById('told').textContent === 'back is loaded'")
    row = page.wait(ROW, "back")
    assert "device" in row or "host" in row
    assert "MiB" in row
    page.click("#none")
    page.click('#names input[value="back"]')
    page.type("#prompt", "hello")
    page.click("#send")
    assert page.wait(ANSWERS, 2) == {BASE: "hello", "back": "olleh"}
    page.click('[data-unload="back"]')
    page.wait("return document.getElementById('told').textContent === 'back is unloaded'")
    page.wait(f"{ROW} === undefined", "back")
    assert page.wait(COUNT, 5)


def test_what_is_missing_from_a_question_is_told(page: Browser) -> None:
    focused = "return document.activeElement.id || document.activeElement.value"
    page.click("#send")
    assert page.run(focused) == "prompt"
    page.click("#none")
    page.click(f'#names input[value="{BASE}"]')
    assert page.text("#chosen") == "nobody chosen: choose who answers"
    page.type("#prompt", "hello")
    page.press("Enter")
    assert page.run(focused) == BASE
    assert page.run("return document.querySelectorAll('article').length") == 0
    page.press("Space")
    assert page.text("#chosen") == "1 of 5 chosen"


def test_what_the_server_refuses_is_told(window: Browser, url: str) -> None:
    window.open(url)
    window.wait(STATE, "good")
    window.type("#load-name", "bad")
    window.type("#load-path", "/no/such/folder")
    window.press("Enter")
    told = window.wait("return document.querySelector('#told.bad')?.textContent")
    assert "/no/such/folder" in told
    assert any("400" in line for line in window.log())  # the browser notes it; take it away


def test_escape_stops_and_the_server_forgets(window: Browser) -> None:
    engine = make_fake_engine()
    engine.held_at = 3  # letters, until the question is stopped
    with serving(engine) as server:
        window.open(server.url)
        window.wait(STATE, "good")
        window.type("#prompt", "a long answer, one letter every step")
        window.press("Enter")
        window.wait("return document.querySelector('article pre')?.textContent.length > 1")
        window.press("Escape")
        window.wait(
            "return [...document.querySelectorAll('article')].every(one => "
            "one.dataset.state === 'stopped')"
        )
        window.wait("return document.getElementById('stop').disabled")
        wait_for(lambda: not engine.requests)
        leave(window)


def test_markup_stays_text(window: Browser) -> None:
    word = "<img src=x onerror=alert(1)>"
    engine = make_fake_engine()
    engine.load_adapter("<b>bold</b>", "bundled")
    with serving(engine) as server:
        window.open(server.url)
        window.wait(COUNT, 6)
        window.click("#none")
        window.type("#prompt", word)
        window.press("Enter")
        assert window.wait(ANSWERS, 1) == {BASE: word}
        assert window.run("return document.querySelectorAll('main img, main td b').length") == 0
        leave(window)


def test_the_keyboard_reaches_everything_in_order(page: Browser) -> None:
    seen = ["prompt"]
    assert page.run("return document.activeElement.id") == "prompt"
    for _ in range(16):
        page.press("Tab")
        seen.append(
            page.run("const at = document.activeElement; return at.id || at.value || at.tagName")
        )
    order = [seen.index(name) for name in ("send", "all", "none", BASE, "upper", "SUMMARY")]
    assert order == sorted(order)


def test_charts_follow_the_figures(page: Browser) -> None:
    page.type("#prompt", "hello")
    page.press("Enter")
    page.wait(ANSWERS, 5)
    page.wait(
        "return [...document.querySelectorAll('.chart polyline')].some((one) =>"
        " new Set(one.getAttribute('points').match(/[^,]+$|,[^ ]+/g)).size > 1)"
    )
    titles = page.run(
        "return [...document.querySelectorAll('figcaption')].map((one) => one.textContent)"
    )
    assert titles == ["Throughput, tokens/s", "Batch", "Memory in use"]


def test_many_adapters(window: Browser) -> None:
    engine = make_fake_engine()
    for i in range(40):
        engine.load_adapter(f"tenant-{i:02d}", "bundled")
    with serving(engine) as server:
        window.open(server.url)
        window.wait(COUNT, 45)
        assert window.text("#chosen") == "8 of 45 chosen"
        window.type("#prompt", "hello")
        window.press("Enter")
        answers = window.wait(ANSWERS, 8)  # more than run at once
        assert set(answers.values()) == {"hello", "olleh", "ifmmp", "ehllo"}
        window.type("#filter", "-1")
        assert window.wait(COUNT, 10)
        window.click("#all")
        assert window.text("#chosen") == "10 of 45 chosen"
        rows = window.run("return document.querySelectorAll('#rows tr').length")
        assert rows == 44
        leave(window)


def test_thousands_of_adapters_are_asked_for_in_part(window: Browser) -> None:
    engine = make_fake_engine()
    for i in range(1000):
        engine.load_adapter(f"tenant-{i:03d}", "bundled")
        if i not in (7, 998):  # the others are in their files alone
            adapters = engine.adapter_listing.adapters
            adapters[f"tenant-{i:03d}"] = replace(adapters[f"tenant-{i:03d}"], state="registered")
    rows = "return [...document.querySelectorAll('#rows tr')].map((one) => one.dataset.adapter)"
    with serving(engine) as server:
        window.open(server.url)
        window.wait(COUNT, 200)
        engine.adapter_listing.looks = 0
        window.type("#filter", "-998")
        window.wait(COUNT, 1)
        assert window.text("#chosen") == "8 chosen"
        window.click("#all")
        assert window.text("#chosen") == "1 chosen"
        window.type("#prompt", "hello")
        window.press("Enter")
        assert window.wait(ANSWERS, 1) == {"tenant-998": "hello"}
        names = window.run(rows)
        assert len(names) == 200
        assert names[:6] == sorted([*NAMES, "tenant-007", "tenant-998"])
        assert window.run("return !document.getElementById('rows-more').hidden")
        window.type("#find", "ANT-99")
        window.wait(f"{rows.replace('return', 'const names =')}; return names.length === 10")
        assert window.run(rows) == [f"tenant-99{i}" for i in range(10)]
        assert engine.adapter_listing.looks < 5000
        leave(window)


def test_it_asks_for_a_key(window: Browser) -> None:
    options = ServerOptions((BASE,), api_keys=("secret",), status_interval=None)
    with serving(make_fake_engine(), options) as server:
        window.open(server.url)
        window.wait(STATUS, WANTS_KEY)
        assert window.run(STATE, "bad")
        window.type("#key", "secret")
        window.press("Enter")
        window.wait(COUNT, 5)
        window.wait(STATE, "good")
        leave(window)


def test_a_key_for_some_models_gets_a_page_without_charts(window: Browser) -> None:
    keys = {"some": frozenset({BASE})}
    options = ServerOptions((BASE,), restricted_keys=keys, status_interval=None)
    with serving(make_fake_engine(), options) as server:
        window.open(server.url)
        window.wait(STATUS, WANTS_KEY)
        window.type("#key", "some")
        window.press("Enter")
        window.wait(COUNT, 1)
        window.wait(STATE, "good")
        shown = (
            "return [...document.querySelectorAll('figure li')].filter((li) => !li.hidden).length"
        )
        assert window.wait(f"{shown} === 0")
        leave(window)


def test_an_engine_that_does_not_answer_is_told(
    window: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(make_fake_engine()) as server:
        engine, released = server.app.state.service.engine, threading.Event()
        page = engine.adapter_page

        async def held(*wanted: Any) -> Any:
            while not released.is_set():
                await asyncio.sleep(0.05)
            return await page(*wanted)

        monkeypatch.setattr(engine, "adapter_page", held)
        window.open(server.url)
        window.wait(STATUS, "not reachable: no answer within 8 seconds")
        assert window.run(STATE, "bad")
        released.set()
        window.wait(STATE, "good")
        leave(window)


def test_screenshots(page: Browser, url: str, tmp_path: Path) -> None:
    """With VEXPERT_SCREENSHOTS=docs/images: the documentation's pictures, after some traffic."""
    kept = os.environ.get("VEXPERT_SCREENSHOTS")
    folder = Path(kept) if kept else tmp_path
    traffic(url, seconds=150 if kept else 0)
    page.type("#prompt", "hello")
    page.press("Enter")
    page.wait(ANSWERS, 5)
    for name, width, scheme in SHOTS:
        wanted = {"name": SCHEME, "value": scheme}
        page.command("Emulation.setEmulatedMedia", features=[wanted])
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        page.command("Emulation.setDeviceMetricsOverride", **metrics)
        page.wait("return document.documentElement.scrollWidth <= arguments[0]", width)
        page.screenshot(folder / f"{name}.png")
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    colours = page.run("return getComputedStyle(document.body).backgroundColor")
    page.command("Emulation.setEmulatedMedia", features=[{"name": SCHEME, "value": "dark"}])
    page.wait("return getComputedStyle(document.body).backgroundColor !== arguments[0]", colours)
    page.command("Emulation.clearDeviceMetricsOverride")
    page.command("Emulation.setEmulatedMedia", features=[])


def traffic(url: str, seconds: float) -> None:
    """Requests to all names, now more and now fewer."""
    draw, end = random.Random(0), time.monotonic() + seconds
    with ThreadPoolExecutor(24) as pool:
        while time.monotonic() < end:
            many = 4 + 10 * (1 + math.sin(time.monotonic() / 9))
            name = draw.choice([BASE, "upper", "upper", "sort", "reverse", "shift"])
            body = {"model": name, "prompt": "some words", "ignore_eos": True}
            body["max_tokens"] = draw.randrange(30, 300)
            pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            time.sleep(2 / many)
