"""Chat templates of adapters: as transformers renders them, and in bounds whatever they do."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from helpers_server import (
    BASE,
    FakeEngine,
    RunningServer,
    make_fake_engine,
    serving,
    wait_for,
)
from starlette.requests import Request
from transformers import AutoTokenizer

from vexpert import demo
from vexpert.engine.template_errors import TEMPLATE_ERRORS
from vexpert.errors import RequestError
from vexpert.lora.chat_template import ChatTemplate, read_template
from vexpert.server import renderer, service, template_worker
from vexpert.server.options import ServerOptions
from vexpert.server.protocol.fields import is_small
from vexpert.server.refusals import name_of
from vexpert.server.renderer import Renderer

pytest_plugins = ["helpers_server_fixtures"]

CHAT = "/v1/chat/completions"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "héllo \ud800"},
]
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
SAME = [
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}",
    "{% if tools %}{{ tools | tojson }}{{ tools[0] | tojson(indent=2) }}{% endif %}",
    "{%- for m in messages -%}\n  {%- if loop.last %}{% break %}{% endif %}\n"
    "  {{ m.role }}\n{% endfor %}",
    "{% set ns = namespace(found=false, n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}{{ ns.found }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ eos_token }}{{ note }}",
    "{% if add_generation_prompt %}<assistant>{% endif %}{{ documents is none }}",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[0].role) }}{{ dict(a=1) }}",
    "{{ strftime_now('%Y') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}",
    "{{ messages | map(attribute='role') | join(',') }}{{ none }}{{ missing }}",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.model_path())


@pytest.mark.parametrize("template", SAME)
def test_a_template_means_what_it_means_to_transformers(tokenizer: Any, template: str) -> None:
    variables = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "note": "n"}
    variables = {name: value for name, value in variables.items() if value is not None}
    common: dict[str, Any] = {"tools": TOOLS, "add_generation_prompt": True}
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=template, tokenize=False, note="n", **common
    )
    given = variables | common | {"messages": MESSAGES, "documents": None}
    assert template_worker.render(template, given, 10**6) == expected


@pytest.fixture(scope="module")
def rendering() -> Iterator[Renderer]:
    made = Renderer(most=1000, seconds=0.5)
    with mock.patch.object(renderer, "WAIT_SECONDS", 200.0):  # the processor's time counts alone
        yield made
    made.close()


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{% for i in range(10**9) %}x{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "second"),
        ("{{ 'x' * 10**10 }}", "memory"),
        ("{{ 'x' * 1001 }}", "more than 1000 characters"),
        ("{% for i in range(9999) %}x{% endfor %}", "more than 1000 characters"),
        ("{{ 7 ** (7 ** 10) }}", "seconds"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ [].pop() }}", "unsafe"),
        ("{% if", "unexpected"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{% include 'other' %}", "no loader"),
        ("{{ raise_exception('not so') }}", "not so"),
        ("{{ raise_exception('x' * 10**6) }}", "x" * 1000),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% set ns = namespace() %}{% set ns.__x__ = 1 %}", "begin otherwise"),
        ("{{ namespace(__class__=1) }}", "begin otherwise"),
        ("{{ dict.__subclasses__() }}", "no attribute"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ '{5}'.format(1) }}", "index out of range"),
        ("{% break %}", "break"),
        ("{% for i in [1] %}" * 25 + "{% endfor %}" * 25, "nested"),
        ("{{ dict(a=1, a=2) }}", "repeated"),
        ("{% macro a(x, x) %}{% endmacro %}", "duplicate argument"),
        ("{{ cycler().current }}", "at least one item"),
        ("{{ 1e999 | int }}", "inf"),
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(
    rendering: Renderer, template: str, told: str
) -> None:
    with pytest.raises(RequestError, match=told):
        rendering.submit(template, {"messages": MESSAGES}).result(renderer.WAIT_SECONDS)
    assert rendering.submit("{{ 1 + 1 }}", {}).result() == "2"


def test_a_template_out_of_bounds_is_not_tried_again_at_once(
    rendering: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{% for i in range(9998) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="takes more than"):
        rendering.submit(template, {}).result()
    with pytest.raises(RequestError, match="a moment ago"):
        rendering.submit(template, {}).result()
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 61)
    with pytest.raises(RequestError, match="takes more than"):
        rendering.submit(template, {}).result()


# Endless for a long first message alone, as a template may be that was written for short ones.
SLOW = (
    "{# "
    + "long" * 3000
    + " #}{% if messages[0].content | length > 99 %}{% for i in range(9997) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0].content }}"
)


def said(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


def test_only_who_took_a_template_out_of_bounds_is_refused_it(
    rendering: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="takes more than"):
        rendering.submit(SLOW, said("x" * 2000), "one").result()
    with monkeypatch.context() as patch:
        patch.setattr(renderer._Worker, "ask", lambda *_: 1 / 0)  # no process is asked
        for length in (2000, 3000, 1500):  # the same again, more, not much less
            with pytest.raises(RequestError, match="yours made it leave its bounds a moment ago"):
                rendering.submit(SLOW, said("x" * length), "one").result()
    assert rendering.submit(SLOW, said("hello"), "one").result() == "hello"
    assert rendering.submit(SLOW, said("x" * 90), "two").result() == "x" * 90
    assert rendering.submit("{{ 3 }}", said("x" * 9000), "one").result() == "3"
    with pytest.raises(RequestError, match="takes more than"):
        rendering.submit(SLOW, said("x" * 2000), "two").result()
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 61)
    assert rendering._refusals.why(name_of(SLOW), "one", 9999) is None


def test_callers_are_told_apart_by_key_else_by_address() -> None:
    def caller(**scope: Any) -> str:
        base = {"type": "http", "headers": [(b"authorization", b"Bearer x")]}
        return service._caller(Request({**base, "client": ("1.2.3.4", 5), **scope}))

    assert caller() == "1.2.3.4"  # no key was checked
    assert caller(vexpert_models=None) == "Bearer x"
    assert caller(client=None) == ""


def test_variables_of_a_template_are_few(fake_server: RunningServer) -> None:
    def ask(variables: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": "x"}]
        body = {"model": BASE, "messages": messages, "chat_template_kwargs": variables}
        return fake_server.post(CHAT, json=body)

    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    many = {f"v{i}": i for i in range(5000)}
    for variables in (
        many,
        {"v": [list(many)]},
        {"v": "x" * 300_000},
        {"x" * 300_000: 1},
        {"v": deep},
    ):
        error = ask(variables).json()["error"]
        assert error["param"] == "chat_template_kwargs"
        assert "at most 4096 values and 262144 characters, 32 deep" in error["message"]
    # The fake tokenizer refuses what it does not know; a few of any form pass to it.
    assert ask({"note": "x" * 200}).status_code == 200
    assert is_small({"v": [[1, {"w": None}]]}, 6, 2, 4)
    assert not is_small({"v": [[1, {"w": None}]]}, 5, 2, 4)
    assert not is_small({"v": [[1, {"w": None}]]}, 6, 1, 4)
    assert not is_small({"v": [[1, {"w": None}]]}, 6, 2, 3)


def test_arguments_of_calls_are_parsed_if_they_are_few(fake_server: RunningServer) -> None:
    arguments = '{"a": [' + "[]," * 140_000 + "1]}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    answer = fake_server.post(CHAT, json={"model": BASE, "messages": messages})
    assert answer.status_code == 400
    told = answer.json()["error"]["message"]
    assert told.startswith("messages: the arguments of tool_calls have more than 131072")


def test_a_process_that_died_idle_is_replaced(rendering: Renderer) -> None:
    assert rendering.submit("{{ 1 }}", {}).result() == "1"
    for worker in rendering._workers:
        if worker._process is not None:
            os.kill(worker._process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    assert [rendering.submit("{{ 2 }}", {}).result() for _ in range(4)] == ["2"] * 4


@pytest.mark.parametrize("name", [["x"], {}, None, 1])
def test_odd_names_of_templates(tmp_path: Path, name: Any) -> None:
    odd = {"chat_template": [{"name": name, "template": "a"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(odd))
    assert read_template(tmp_path) == ChatTemplate()
    odd["chat_template"].append({"name": "default", "template": "b"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(odd))
    assert read_template(tmp_path) == ChatTemplate("b")


@pytest.mark.parametrize(
    "template", ["{{ '{5}'.format(1) }}", "{% break %}", "{{ cycler().current }}"]
)
def test_the_operators_template_fails_with_its_reason(tokenizer: Any, template: str) -> None:
    with pytest.raises(TEMPLATE_ERRORS):
        tokenizer.apply_chat_template(MESSAGES, chat_template=template, tokenize=False)


def test_no_secret_of_the_server_reaches_the_process(
    rendering: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VEXPERT_SECRET", "x")
    worker = renderer._Worker(1.0)
    worker.ask(json.dumps(["", {}, 1]))
    assert worker._process is not None
    environment = Path(f"/proc/{worker._process.pid}/environ")
    if environment.exists():
        assert b"VEXPERT_SECRET" not in environment.read_bytes()
    worker.close()


def adapter(engine: FakeEngine, folder: Path, template: str) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(template)
    engine.load_adapter(folder.name, str(folder))


def test_others_go_on_beside_an_endless_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process stands still until others are answered, then it takes the time it may have."""
    monkeypatch.setattr(renderer, "WAIT_SECONDS", 200.0)
    start, started = renderer._Worker._start, list[int]()

    def start_first_stopped(worker: renderer._Worker) -> "subprocess.Popen[str]":
        process = start(worker)
        if not started:
            os.kill(process.pid, signal.SIGSTOP)
        started.append(process.pid)
        return process

    monkeypatch.setattr(renderer._Worker, "_start", start_first_stopped)
    engine = make_fake_engine()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    adapter(engine, tmp_path / "endless", loop)
    adapter(engine, tmp_path / "good", "<user>{{ messages[0].content }}\n")
    options = ServerOptions((BASE,), status_interval=None)

    def ask(running: RunningServer, answers: list[Any]) -> None:
        body = {"model": "endless", "messages": [{"role": "user", "content": "x"}]}
        answers.append(running.post(CHAT, json=body))

    with serving(engine, options) as running:
        answers: list[Any] = []
        asking = threading.Thread(target=ask, args=(running, answers))
        asking.start()
        wait_for(lambda: bool(started))
        try:
            assert running.ask("good", "hello") == "hello"
            assert running.ask(BASE, "hello") == "hello"
            assert asking.is_alive()
        finally:
            os.kill(started[0], signal.SIGCONT)
        asking.join()
        assert answers[0].status_code == 400
        assert "takes more than 2 seconds" in answers[0].json()["error"]["message"]
        assert running.ask("good", "hello") == "hello"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("name", ["chat_template", "sanitize_control_tokens", "tokenize"])
def test_a_request_brings_no_template_of_its_own(path: str, name: str) -> None:
    with serving(make_fake_engine()) as running:
        messages = [{"role": "user", "content": "x"}]
        body = {"model": BASE, "messages": messages, "chat_template_kwargs": {name: "{{ 1 }}"}}
        answer = running.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
