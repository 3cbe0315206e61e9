"""Adapter folders that hold no plain files, or cannot be looked at: refused, nothing hangs."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from test_lora_manager import wait_for_later_times

from vexpert.demo import adapter_paths
from vexpert.errors import AdapterError
from vexpert.lora.files import INDEX, PICKLE, SAFETENSORS, read_tensors
from vexpert.lora.json_files import MAX_BYTES, MAX_INDEX_BYTES, read_json
from vexpert.lora.source import AdapterLoader, Source, check_path, observe
from vexpert.lora.types import TargetMap

NO_TARGETS = TargetMap("none", "None", {}, ())


def make_pipe(path: Path, through_link: bool) -> None:
    target = path.with_name("pipe") if through_link else path
    os.mkfifo(target)
    if through_link:
        path.symlink_to(target)


@pytest.mark.parametrize("through_link", [False, True])
@pytest.mark.parametrize("name", ["adapter_config.json", SAFETENSORS, INDEX, PICKLE])
def test_a_pipe_is_refused_unopened(tmp_path: Path, name: str, through_link: bool) -> None:
    make_pipe(tmp_path / name, through_link)

    def never(*arguments: object, **options: object) -> None:
        raise AssertionError("read")

    loader = AdapterLoader(never, NO_TARGETS, 8, torch.float32)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match=f"{name} is not a regular file"):
        loader.load(Source(tmp_path), torch.empty)
    read = read_tensors
    if name == "adapter_config.json":
        read = lambda folder: read_json(folder / name)  # noqa: E731
    with pytest.raises(AdapterError, match=f"{name} is not a"):
        read(tmp_path)


def test_the_automodel_file_may_be_a_pipe_no_more(tmp_path: Path) -> None:
    shutil.copytree(adapter_paths()["upper"], tmp_path, dirs_exist_ok=True)
    os.mkfifo(tmp_path / "automodel_peft_config.json")
    with pytest.raises(AdapterError, match="not a regular file"):
        observe(tmp_path)


@pytest.mark.parametrize("path", ["a" * 300, "/no/" * 3000, "a\0b", "\ud800"])
def test_a_path_that_no_file_has(path: str) -> None:
    with pytest.raises(AdapterError, match=r"adapter path|no such folder"):
        observe(Path(path))


LEADS_NOWHERE = {
    "gone": r"is a link to 'gone', which is not there",
    "itself": r"is a link to 'itself', which leads back to itself",
    "file/gone": r"is a link to 'file/gone', which is not there",
    "x" * 300: r"is a link to 'xxx[^\n]*, which is not there",
}


@pytest.mark.parametrize("target", LEADS_NOWHERE)
@pytest.mark.parametrize("name", ["adapter_config.json", SAFETENSORS])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, name: str, target: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "itself").symlink_to("itself")
    (tmp_path / name).symlink_to(target)
    told = rf"/{name} {LEADS_NOWHERE[target]}: copy the file itself"
    with pytest.raises(AdapterError, match=told):
        observe(tmp_path)
    read = read_json if name.endswith("json") else read_tensors
    with pytest.raises(AdapterError, match=told):
        read(tmp_path / name if name.endswith("json") else tmp_path)


def test_files_written_again_with_their_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / SAFETENSORS
    path.write_bytes(b"1234")
    before, stat = observe(tmp_path), path.stat()
    wait_for_later_times(tmp_path)
    path.write_bytes(b"5678")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert observe(tmp_path) != before


def test_an_empty_path_is_not_this_folder() -> None:
    with pytest.raises(AdapterError, match="path is empty"):
        check_path("")


@pytest.mark.parametrize(
    ("name", "most"), [("adapter_config.json", MAX_BYTES), (INDEX, MAX_INDEX_BYTES)]
)
def test_a_config_of_gigabytes_is_not_read(tmp_path: Path, name: str, most: int) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(16 * 2**30)
    read = read_tensors if name == INDEX else lambda folder: read_json(folder / name)
    with pytest.raises(AdapterError, match=f"more than {most} bytes"):
        read(tmp_path)
