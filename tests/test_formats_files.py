"""The files of an adapter folder: one, several, pickled, broken, elsewhere."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from helpers_writers import (
    assert_same,
    linear_keys,
    per_expert_keys,
    random_adapter,
    save,
    tiny_map,
)
from safetensors.torch import save_file

from vexpert.errors import AdapterError
from vexpert.lora.reader import read_adapter
from vexpert.lora.types import PerExpertFactors

TARGETS = tiny_map("qwen3_moe")
WANTED = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0))
KEYS = {**linear_keys(WANTED, TARGETS), **per_expert_keys(WANTED, TARGETS)}
WEIGHTS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path) -> Path:
    return save(tmp_path / "adapter", KEYS, r=2, lora_alpha=8)


def refused(folder: Path) -> str:
    with pytest.raises(AdapterError) as error:
        read_adapter(folder, TARGETS)
    assert str(folder) in str(error.value)
    return str(error.value)


def shard(folder: Path) -> dict[str, str]:
    """Cut the one file into two shards with an index."""
    names = sorted(KEYS)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for name, keys in files.items():
        save_file({key: KEYS[key].contiguous() for key in keys}, folder / name)
    (folder / WEIGHTS).unlink()
    weight_map = {key: name for name, keys in files.items() for key in keys}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_one_file(folder):
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_shards(folder):
    shard(folder)
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_index_that_names_a_file_outside(folder):
    weight_map = shard(folder)
    shutil.move(folder / "b.safetensors", folder.parent / "b.safetensors")
    text = json.dumps({"weight_map": weight_map}).replace("b.safe", "../b.safe")
    (folder / INDEX).write_text(text)
    assert "../b.safetensors" in refused(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"x": 1}}']
)
def test_broken_index(folder, content):
    shard(folder)
    (folder / INDEX).write_text(content)
    assert INDEX in refused(folder)


def test_index_and_shards_must_agree(folder):
    weight_map = shard(folder)
    weight_map.pop(next(iter(weight_map)))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "differ in 1 keys" in refused(folder)


def test_missing_shard(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors" in refused(folder)


def test_symlinked_weights_as_download_caches_make_them(folder):
    shutil.move(folder / WEIGHTS, folder.parent / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_dangling_symlink(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../nothing")
    assert "weights are missing" in refused(folder)


def test_symlink_saved_as_text(folder):
    (folder / WEIGHTS).write_text("../weights/blob.safetensors")
    assert "saved as text" in refused(folder)


def test_weights_that_are_a_folder(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    assert "not a file" in refused(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(folder, keep):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:keep])
    assert WEIGHTS in refused(folder)


def test_no_folder(tmp_path):
    assert "no such folder" in refused(tmp_path / "nothing")


def test_no_config(folder):
    (folder / "adapter_config.json").unlink()
    assert "adapter_config.json is missing" in refused(folder)


def test_bin_of_tensors(folder):
    (folder / WEIGHTS).unlink()
    torch.save(KEYS, folder / "adapter_model.bin")
    assert_same(read_adapter(folder, TARGETS), WANTED)


class Runs:
    """A pickle that runs code when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("plain", [True, False])
def test_bin_never_runs_code(folder, plain):
    (folder / WEIGHTS).unlink()
    payload = {"x": Runs(folder / "ran")}
    path = folder / "adapter_model.bin"
    if plain:
        path.write_bytes(pickle.dumps(payload))
    else:
        torch.save(payload, path)
    assert "save the adapter as adapter_model.safetensors" in refused(folder)
    assert not (folder / "ran").exists()


def test_bin_of_other_things(folder):
    (folder / WEIGHTS).unlink()
    torch.save([torch.zeros(2)], folder / "adapter_model.bin")
    assert "not a table of tensors" in refused(folder)


def test_integers_are_refused(folder):
    key = next(iter(KEYS))
    save_file({**KEYS, key: KEYS[key].to(torch.int8)}, folder / WEIGHTS)
    assert "int8" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_values_that_are_not_finite(folder, value, dtype):
    for key in (
        next(iter(KEYS)),
        next(key for key in KEYS if ".experts.2.down_proj.lora_B" in key),
    ):
        bad = KEYS[key].to(dtype, copy=True)
        bad.view(-1)[-1] = value
        save_file({**KEYS, key: bad}, folder / WEIGHTS)
        assert ("NaN" if value != value else "Inf") in refused(folder)


def test_rank_above_the_largest_accepted(folder):
    with pytest.raises(AdapterError, match="max_lora_rank=2"):
        read_adapter(folder, TARGETS, max_rank=1)
    assert_same(read_adapter(folder, TARGETS, max_rank=2), WANTED)


def test_header_whose_length_leaves_tensors_unaligned(folder):
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].rstrip()
    header += b" " * (3 - len(header) % 4 or 4)
    assert len(header) % 4 == 3
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_several_dtypes_in_one_file(folder):
    """Factors keep the file's dtype; experts of several dtypes are widened to float32."""
    key = "base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    other = "base_model.model.lm_head.lora_A.weight"
    mixed = {**KEYS, key: KEYS[key].bfloat16(), other: KEYS[other].double()}
    save_file({k: x.contiguous().clone() for k, x in mixed.items()}, folder / WEIGHTS)
    found = read_adapter(folder, TARGETS)
    assert found.modules["lm_head"].a.dtype == torch.float64
    up = found.modules["model.layers.0.mlp.experts"].up
    assert up.a.dtype == torch.float32
    assert torch.equal(up.a[1], KEYS[key].bfloat16().float())


def test_a_file_that_is_cut_while_it_is_read_is_refused(folder, monkeypatch):
    """Not a crash: a mapping of it would be a fault of the whole process."""
    read = os.preadv

    def cut(fd: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(folder / WEIGHTS, 100)
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", cut)
    assert "ended at byte 100" in refused(folder)


def test_a_disk_error_in_the_middle_is_refused(folder, monkeypatch):
    def fail(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    assert "Input/output error" in refused(folder)


def test_several_threads_read_the_same(folder, monkeypatch):
    monkeypatch.setattr("vexpert.lora.files.READ_BYTES", 1000)
    monkeypatch.setattr("vexpert.lora.parallel.thread_count", lambda: 4)
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_pairs_of_single_experts_are_not_stacked_before_they_are_asked_for(folder):
    modules = read_adapter(folder, TARGETS).modules
    pairs = [m.gate for m in modules.values() if hasattr(m, "gate")]
    assert pairs
    for pair in pairs:
        assert isinstance(pair, PerExpertFactors)
        assert "a" not in vars(pair)
        assert pair.rank == pair.a.shape[1] == pair.b.shape[2]
