"""Below an allowed root an adapter's files are read from below it alone, whenever links change."""

import functools
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_server import BASE, make_fake_engine, serving
from safetensors.torch import save_file
from test_lora_manager import TARGETS, weights_of

from vexpert.config import EngineConfig
from vexpert.errors import AdapterError, ConfigError
from vexpert.lora import opening
from vexpert.lora.chat_template import ChatTemplate
from vexpert.lora.files import INDEX, PICKLE, SAFETENSORS, read_tensors
from vexpert.lora.json_files import read_json
from vexpert.lora.manager import AdapterManager
from vexpert.lora.opening import limited, open_file, resolved_inside
from vexpert.lora.source import AdapterLoader, Source
from vexpert.lora.types import AdapterWeights, LoraState, TargetMap
from vexpert.server.options import ServerOptions

CONFIG = "adapter_config.json"
TENSORS = {"x": torch.ones(2)}


@pytest.fixture
def roots(tmp_path: Path) -> tuple[str, ...]:
    """One root; beside it a folder `out` with a whole adapter."""
    for name in ("in", "out"):
        folder = tmp_path / name / "a"
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(f'{{"where": "{name}"}}')
        (folder / INDEX).write_text(f'{{"weight_map": {{"x": "{SAFETENSORS}"}}}}')
        (folder / "chat_template.jinja").write_text(f"{name} {{{{ messages }}}}")
        save_file(TENSORS, folder / SAFETENSORS)
        torch.save(TENSORS, folder / PICKLE)
    return (str(tmp_path / "in"),)


def swap(file: Path, to: Path) -> None:
    """Make a link of a file, or folder, that is there."""
    shutil.rmtree(file) if file.is_dir() else file.unlink()
    file.symlink_to(to)


def read_only(folder: Path, name: str) -> object:
    """Read `folder` through the file `name`."""
    if name == CONFIG:
        return read_json(folder / CONFIG)
    for other in {SAFETENSORS, INDEX, PICKLE} - {name}:
        if (name, other) != (INDEX, SAFETENSORS):
            (folder / other).unlink(missing_ok=True)
    if name == INDEX:
        shutil.move(folder / SAFETENSORS, folder / "shard.safetensors")
        (folder / INDEX).write_text('{"weight_map": {"x": "shard.safetensors"}}')
        (folder / "shard.safetensors").unlink()
        (folder / "shard.safetensors").symlink_to(folder.parents[1] / "out" / "a" / SAFETENSORS)
    return read_tensors(folder)


@pytest.mark.parametrize("name", [CONFIG, SAFETENSORS, INDEX, PICKLE])
def test_every_reader_stays_inside(tmp_path: Path, roots: tuple[str, ...], name: str) -> None:
    folder = tmp_path / "in" / "a"
    if name != INDEX:  # whose shard is the link
        swap(folder / name, tmp_path / "out" / "a" / name)
    with limited(folder, roots), pytest.raises(AdapterError, match="leads out of the folders"):
        read_only(folder, name)


def test_links_inside_and_folders_elsewhere_are_read(
    tmp_path: Path, roots: tuple[str, ...]
) -> None:
    folder = tmp_path / "in" / "a"
    shutil.copytree(folder, tmp_path / "in" / "blobs")
    swap(folder / SAFETENSORS, tmp_path / "in" / "blobs" / SAFETENSORS)
    (tmp_path / "link").symlink_to(tmp_path / "in")
    for each in (folder, tmp_path / "out" / "a"):  # the second can only be the operator's
        with limited(each, roots):
            assert read_tensors(each)["x"].tolist() == [1, 1]
    with limited(tmp_path / "link" / "a", (str(tmp_path / "link"),)):
        assert read_json(tmp_path / "link" / "a" / CONFIG) == {"where": "in"}
    with pytest.raises(FileNotFoundError), limited(folder, roots):
        open_file(folder / "missing")
    with pytest.raises(IsADirectoryError), limited(folder, roots):
        open_file(folder)
    assert resolved_inside(tmp_path / "in", roots) == tmp_path / "in"
    assert resolved_inside(tmp_path / "in-not", roots) is None


@pytest.mark.parametrize("part", ["a", f"a/{CONFIG}"])
def test_a_link_swapped_between_the_look_and_the_open(
    tmp_path: Path, roots: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    descend, begun = opening._descend, []

    def late(*arguments: Any) -> int:
        swap(tmp_path / "in" / part, tmp_path / "out" / part)
        begun.append(True)
        return descend(*arguments)

    monkeypatch.setattr(opening, "_descend", late)
    with limited(tmp_path / "in" / "a", roots), pytest.raises(AdapterError, match="changed while"):
        read_json(tmp_path / "in" / "a" / CONFIG)
    assert begun


def test_nothing_stays_open(tmp_path: Path, roots: tuple[str, ...]) -> None:
    before = len(os.listdir("/dev/fd"))
    (tmp_path / "in" / "a" / "away").symlink_to(tmp_path / "out")
    os.mkfifo(tmp_path / "in" / "a" / "pipe")
    with limited(tmp_path / "in" / "a", roots):
        for name in (CONFIG, "away/a", "pipe", "missing", "missing/x", f"{CONFIG}/x", "."):
            try:
                open_file(tmp_path / "in" / "a" / name).close()
            except (AdapterError, OSError):
                continue
    assert len(os.listdir("/dev/fd")) == before


def load_again(folder: Path, roots: tuple[str, ...], between: Callable[[], None]) -> None:
    """Read an adapter as after an eviction; `between` comes after the look at its files."""

    def read(path: Any, targets: TargetMap, **options: object) -> Any:
        between()
        read_json(path / CONFIG)
        raise AssertionError("read")

    loader = AdapterLoader(read, TargetMap("", "", {}, ()), 8, torch.float32, roots=roots)
    source = Source(folder)
    loader.load(source, torch.empty, source.observe())


@pytest.mark.parametrize("part", ["a", f"a/{CONFIG}"])
def test_a_reload_after_a_swap(tmp_path: Path, roots: tuple[str, ...], part: str) -> None:
    change = functools.partial(swap, tmp_path / "in" / part, tmp_path / "out" / part)
    with pytest.raises(AdapterError, match="leads out of"):
        load_again(tmp_path / "in" / "a", roots, change)


@pytest.mark.parametrize("part", ["a", "a/chat_template.jinja"])
def test_a_template_after_a_swap(tmp_path: Path, roots: tuple[str, ...], part: str) -> None:
    def template_of(folder: Path) -> ChatTemplate:
        loader = AdapterLoader(read, TargetMap("", "", {}, ()), 8, torch.float32, roots=roots)
        return loader.read_template(Source(folder), None)[0]

    folder = tmp_path / "in" / "a"
    assert template_of(folder) == ChatTemplate("in {{ messages }}")
    swap(tmp_path / "in" / part, tmp_path / "out" / part)
    found = template_of(folder)
    assert found.text is None
    assert found.fault is not None
    assert re.search(r"chat_template\.jinja cannot be read.*leads out of", found.fault)
    assert template_of(tmp_path / "out" / "a") == ChatTemplate("out {{ messages }}")


def read(path: Any, targets: TargetMap, **options: object) -> AdapterWeights:
    if (where := read_json(path / CONFIG)["where"]) != "in":
        raise AdapterError(f"read from {where}")
    return weights_of(1)


def test_a_manager_keeps_to_the_roots(tmp_path: Path, roots: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="allowed_adapter_roots='x': must be a tuple of str"):
        EngineConfig(allowed_adapter_roots="x")  # type: ignore[arg-type]
    config = EngineConfig(max_loras=1, lora_memory=1 << 20, allowed_adapter_roots=roots)
    device = torch.device("cpu")
    manager = AdapterManager(TARGETS, LoraState(), config, device, torch.float32, read)
    assert pickle.loads(pickle.dumps(manager._host._loader.portable())).roots == roots
    manager.load("whole", tmp_path / "in" / "a")
    shutil.copytree(tmp_path / "in" / "a", tmp_path / "in" / "b")
    swap(tmp_path / "in" / "b" / CONFIG, tmp_path / "out" / "a" / CONFIG)
    with pytest.raises(AdapterError, match="leads out of"):
        manager.load("linked", tmp_path / "in" / "b")
    with pytest.raises(AdapterError, match="read from out"):  # the operator named it
        manager.load("elsewhere", tmp_path / "out" / "a")


def test_the_server_keeps_the_resolved_folder(tmp_path: Path, roots: tuple[str, ...]) -> None:
    """A link to the folder, or above it, may change afterwards: nothing is read through it."""
    (tmp_path / "in" / "current").symlink_to("a")
    (tmp_path / "way").symlink_to(tmp_path / "in")
    options = ServerOptions((BASE,), allowed_adapter_roots=roots, status_interval=None)
    engine = make_fake_engine()
    with serving(engine, options) as running:
        for i, path in enumerate(["in/current", "way/a", "way/current"]):
            body = {"lora_name": f"x{i}", "lora_path": str(tmp_path / path)}
            assert running.post("/v1/load_lora_adapter", json=body).status_code == 200
            assert engine.adapter_folder(f"x{i}") == str(tmp_path / "in" / "a")
        chat = {"model": "x0", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        assert running.post("/v1/chat/completions", json=chat).status_code == 200
        shutil.rmtree(tmp_path / "in" / "a")  # the template is what was there at the load
        assert running.post("/v1/chat/completions", json=chat).status_code == 200
        assert "in " in str(engine.prompts[-1])
