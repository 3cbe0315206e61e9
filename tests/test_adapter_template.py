"""A version of an adapter keeps the chat template that it was loaded with."""

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from helpers_server import BASE, make_fake_engine, serving
from helpers_wait import wait_for
from test_lora_manager import folder, make, wait_for_later_times

from vexpert.errors import AdapterError, AdapterNotFoundError
from vexpert.lora.chat_template import MAX_BYTES, ChatTemplate, read_template
from vexpert.lora.types import AdapterRef
from vexpert.server.options import ServerOptions

A, B = ChatTemplate("a {{ messages }}"), ChatTemplate("b {{ messages }}")
FILE = "chat_template.jinja"


def adapter_folder(tmp_path: Path, name: str = "x", template: str | None = A.text) -> Path:
    path = folder(tmp_path, name, 1)
    if template is not None:
        (path / FILE).write_text(template)
    return path


def test_a_loaded_version_keeps_its_template_until_it_is_loaded_anew(tmp_path: Path) -> None:
    path, manager = adapter_folder(tmp_path), make()
    manager.load("x", path)
    assert manager.chat_template("x", may_read=False) == A
    (path / FILE).write_text(B.text or "")
    assert manager.chat_template("x", may_read=True) == A
    manager.load("x", path, load_inplace=True)
    assert manager.chat_template("x", may_read=False) == B
    shutil.rmtree(path)
    assert manager.chat_template("x", may_read=True) == B
    manager.unload("x")
    with pytest.raises(AdapterNotFoundError):
        manager.chat_template("x", may_read=True)


def test_equal_templates_are_kept_once(tmp_path: Path) -> None:
    manager = make()
    for name in ("x", "y"):
        manager.load(name, adapter_folder(tmp_path, name))
    first, second = (manager.chat_template(name, may_read=False) for name in ("x", "y"))
    assert first is not None
    assert second is not None
    assert first.text is second.text


def test_a_registered_version_is_what_its_template_was_read_with(tmp_path: Path) -> None:
    path, manager = adapter_folder(tmp_path), make()
    manager.register("x", path)
    assert manager.chat_template("x", may_read=False) is None
    assert manager.chat_template("x", may_read=True) == A
    wait_for_later_times(tmp_path)
    (path / FILE).write_text(B.text or "")
    assert manager.chat_template("x", may_read=True) == A
    ref = manager.resolve("x")
    manager.hold(ref)
    ended: dict[AdapterRef, str] = {}
    wait_for(lambda: ended.update(manager.advance()) or ref in ended)
    assert "changed or vanished since" in ended[ref]
    manager.drop(ref)
    with pytest.raises(AdapterError, match="changed or vanished"):
        manager.chat_template("x", may_read=True)


def test_a_template_read_amid_a_load_is_held_to_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manager = adapter_folder(tmp_path), make()
    is_read, may_end = threading.Event(), threading.Event()
    load = manager._host._load

    def slow(*arguments: Any) -> Any:
        copy = load(*arguments)
        is_read.set()
        assert may_end.wait(60)
        return copy

    monkeypatch.setattr(manager._host, "_load", slow)
    manager.register("x", path)
    ref = manager.resolve("x")
    manager.hold(ref)
    assert is_read.wait(60)
    wait_for_later_times(tmp_path)
    (path / FILE).write_text(B.text or "")
    assert manager.chat_template("x", may_read=True) == B
    may_end.set()
    ended: dict[AdapterRef, str] = {}
    wait_for(lambda: ended.update(manager.advance()) or ref in ended)
    assert "changed" in ended[ref]
    manager.drop(ref)


def test_a_broken_template_spoils_no_adapter(tmp_path: Path) -> None:
    path, manager = adapter_folder(tmp_path, template=None), make()
    (path / FILE).write_bytes(b"\xff")
    manager.load("x", path)
    found = manager.chat_template("x", may_read=False)
    assert found is not None
    assert found.text is None
    assert "chat_template.jinja cannot be read: 'utf-8'" in str(found.fault)
    (path / FILE).write_bytes(b"x" * (MAX_BYTES + 1))
    assert f"more than {MAX_BYTES} bytes" in str(read_template(path).fault)
    (path / FILE).unlink()
    assert read_template(path) == ChatTemplate()
    os.mkfifo(path / FILE)
    assert "not a regular file" in str(read_template(path).fault)


def test_a_server_asks_by_the_template_of_the_load(tmp_path: Path) -> None:
    path = adapter_folder(tmp_path, template="<user>{{ messages[0].content }}\n")
    (path / "adapter_config.json").write_text("{}")
    engine = make_fake_engine()
    engine.load_adapter("mine", str(path))
    with serving(engine, ServerOptions((BASE,), status_interval=None)) as running:
        assert running.ask("mine", "hello") == "hello"
        assert engine.prompts[-1] == "<user>hello"
        shutil.rmtree(path)
        assert running.ask("mine", "hello") == "hello"
        assert engine.prompts[-1] == "<user>hello"
