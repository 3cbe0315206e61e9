"""The page at /: what is served, to whom, and that it asks nobody else."""

import re
from collections.abc import Iterator

import pytest
from helpers_server import BASE, RunningServer, make_fake_engine, serving

from vexpert.cli.main import build_parser
from vexpert.server.options import ServerOptions
from vexpert.server.routes import web

pytest_plugins = ["helpers_server_fixtures"]
SOURCES = {"index.html": web.PAGE, **{name: content for name, (content, _) in web.FILES.items()}}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    options = ServerOptions((BASE,), api_keys=("secret",), status_interval=None)
    with serving(make_fake_engine(), options) as running:
        yield running


def test_the_page_and_each_file_it_names_are_served(server: RunningServer) -> None:
    page = server.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    named = set(re.findall(r'(?:href|src)="(web/[^"]+)"', page.text))
    assert named == {"web/icon.svg", "web/style.css", "web/main.js"}
    imported = {
        f"web/{name}"
        for content in SOURCES.values()
        for name in re.findall(r'from "\./([^"]+)"', content.decode())
    }
    assert {f"/{path}" for path in named | imported} == set(web.PATHS) - {"/"}
    for path in sorted(named | imported):
        answer = server.get(f"/{path}")
        assert answer.status_code == 200
        kind = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
        assert answer.headers["content-type"].startswith(kind[path.rpartition(".")[2]])


@pytest.mark.parametrize("name", ["index.html", "nothing.js", "..%2Foptions.py", "%00"])
def test_nothing_else_is_served(server: RunningServer, name: str) -> None:
    assert server.get(f"/web/{name}").status_code == 404


def test_a_policy_forbids_what_the_page_does_not_need(server: RunningServer) -> None:
    for path in web.PATHS:
        headers = server.get(path).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        sources = {policy[kind] for kind in ("script-src", "style-src", "connect-src", "img-src")}
        assert sources == {"'self'"}
        assert policy["frame-ancestors"] == "'none'"
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_no_inline_script_and_no_other_origin(name: str) -> None:
    text = SOURCES[name].decode().replace('"http://www.w3.org/2000/svg"', "")  # a name space
    assert not re.search(r"https?:|//[a-z]+\.", text)
    assert not re.search(r"\son\w+=|style=|<script(?![^>]*src=)|<style", text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_fields_have_labels() -> None:
    page = web.PAGE.decode()
    labelled = set(re.findall(r'<label for="([^"]+)"', page))
    labelled |= set(re.findall(r'<label[^>]*>[^<]*<input id="([^"]+)"', page))
    assert set(re.findall(r'<(?:input|textarea) id="([^"]+)"', page)) == labelled


def test_the_page_needs_no_key_but_the_api_does(locked: RunningServer) -> None:
    for path in web.PATHS:
        assert locked.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/web/", "/web/nothing.js"):
        assert locked.get(path).status_code == 401


def test_it_can_be_switched_off() -> None:
    assert build_parser().parse_args(["serve", "--no-web"]).no_web
    options = ServerOptions((BASE,), web=False, status_interval=None)
    with serving(make_fake_engine(), options) as running:
        assert {running.get(path).status_code for path in web.PATHS} == {404}


def test_it_is_no_part_of_the_described_api(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert not {path for path in paths if path == "/" or path.startswith("/web")}
