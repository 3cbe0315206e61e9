"""The files of an adapter folder: one, several, pickled, broken, elsewhere."""

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers_writers import (
    assert_same,
    fused_keys,
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
    assert "differ in 1 key:" in refused(folder)


def test_missing_shard(folder):
    shard(folder)
    (folder / "b.safetensors").unlink()
    assert "b.safetensors is missing: copy the whole adapter again" in refused(folder)


def test_shards_without_their_index(folder):
    for number, part in enumerate((list(KEYS)[::2], list(KEYS)[1::2]), 1):
        name = f"adapter_model-0000{number}-of-00002.safetensors"
        save_file({key: KEYS[key].contiguous() for key in part}, folder / name)
    (folder / WEIGHTS).unlink()
    message = refused(folder)
    assert "2 shards, first adapter_model-00001-of-00002.safetensors, but no " + INDEX in message


@pytest.mark.parametrize("name", [WEIGHTS, "adapter_model.bin", "adapter_config.json"])
def test_a_pointer_of_git_lfs(folder, name):
    if name.endswith("bin"):
        (folder / WEIGHTS).unlink()
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (folder / name).write_text(text)
    assert f"{name} is a git-lfs pointer" in refused(folder)
    assert "run `git lfs pull`" in refused(folder)


def test_symlinked_weights_as_download_caches_make_them(folder):
    shutil.move(folder / WEIGHTS, folder.parent / "blob")
    (folder / WEIGHTS).symlink_to("../blob")
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_dangling_symlink(folder):
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("../nothing")
    assert "is not there: copy the file itself" in refused(folder)


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
    message = refused(folder)
    assert "save the adapter as adapter_model.safetensors" in message
    assert plain or "holds Python objects" in message
    assert "weights_only" not in message
    assert "\x1b" not in message
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


def test_a_file_that_is_written_while_it_is_read(folder, monkeypatch):
    read, written = os.preadv, os.stat(folder / WEIGHTS).st_mtime_ns

    def write(*args):
        os.utime(folder / WEIGHTS, ns=(written, written + 1))
        return read(*args)

    monkeypatch.setattr(os, "preadv", write)
    assert "changed while it was read" in refused(folder)


def header_of(folder: Path) -> tuple[dict, bytes]:
    data = (folder / WEIGHTS).read_bytes()
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def with_header(folder: Path, text: str, body: bytes) -> Path:
    raw = text.encode()
    (folder / WEIGHTS).write_bytes(len(raw).to_bytes(8, "little") + raw + body)
    return folder


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "Q4"},
        {"dtype": None},
        {"shape": [2, 17]},
        {"shape": [-2, -16]},
        {"shape": [True]},
        {"shape": "x"},
        {"data_offsets": [0]},
        {"data_offsets": [-4, 124]},
        {"data_offsets": [0, 2**63]},
        {"data_offsets": [64, 192]},
    ],
)
def test_a_header_that_does_not_fit(folder, change):
    header, body = header_of(folder)
    header[FIRST] |= change
    with_header(folder, json.dumps(header), body)
    assert "not a readable safetensors file" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "", "nul", "\ud83d", '{"a": 1}', "[" * 100_000])
def test_a_header_that_is_none(folder, text):
    (folder / WEIGHTS).write_bytes(b"")
    with_header(folder, text.encode("utf-8", "replace").decode(), b"1234")
    assert WEIGHTS in refused(folder)


def test_a_key_twice_in_the_header(folder):
    header, body = header_of(folder)
    text = json.dumps(header)[:-1] + f', "{FIRST}": {json.dumps(header[FIRST])}}}'
    with_header(folder, text, body)
    assert "there twice" in refused(folder)


def test_bytes_that_no_tensor_has(folder):
    header, body = header_of(folder)
    with_header(folder, json.dumps(header), body + b"xx")
    assert "tensors end at byte" in refused(folder)


@pytest.mark.parametrize("spaces", [1, 2, 5])
def test_tensors_at_odd_places(folder, spaces):
    header, body = header_of(folder)
    with_header(folder, json.dumps(header) + " " * spaces, body)
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_a_name_that_cannot_be_encoded(folder):
    header, body = header_of(folder)
    text = json.dumps(header).replace(FIRST, FIRST.replace("q_proj", "q_proj\\ud800"))
    with_header(folder, text, body)
    assert refused(folder).encode("utf-8")


ODD = [
    lambda x: x.to_sparse(),
    lambda x: x.to_sparse_csr(),
    lambda x: x.to("meta"),
    lambda x: torch.zeros(1, 1).expand(1 << 36, 40),
    lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    lambda x: torch.nested.nested_tensor([x]),
]


@pytest.mark.parametrize("make", ODD, ids=["coo", "csr", "meta", "expanded", "quantized", "nested"])
@pytest.mark.filterwarnings("ignore")
def test_bin_of_odd_tensors(folder, make):
    (folder / WEIGHTS).unlink()
    torch.save({**KEYS, FIRST: make(KEYS[FIRST])}, folder / "adapter_model.bin")
    assert FIRST in refused(folder)


def test_bin_of_negated_and_transposed_views(folder):
    (folder / WEIGHTS).unlink()
    views = {key: torch._neg_view(-x).T.contiguous().T for key, x in KEYS.items() if x.ndim == 2}
    torch.save({**KEYS, **views}, folder / "adapter_model.bin")
    assert_same(read_adapter(folder, TARGETS), WANTED)


def test_a_shard_of_too_long_a_name(folder):
    weight_map = shard(folder)
    weight_map[next(iter(weight_map))] = "a" * 5000
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert "File name too long" in refused(folder)
    assert len(refused(folder)) < 1000


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(folder):
    (folder / WEIGHTS).chmod(0)
    assert "Permission denied" in refused(folder)


@pytest.mark.parametrize("scale", [1e300, 1e39])
def test_values_beyond_the_dtypes_range(folder, scale):
    save(folder, KEYS, r=2, lora_alpha=scale)
    assert "times the scale" in refused(folder)
    save(folder, {**KEYS, FIRST: KEYS[FIRST].double() * scale}, r=2)
    assert "layers.0.self_attn.q_proj.lora_A holds" in refused(folder)


def test_a_zero_a_is_told(folder):
    save(folder, {**KEYS, FIRST: KEYS[FIRST] * 0}, r=2, lora_alpha=8)
    (warning,) = read_adapter(folder, TARGETS).warnings
    assert warning.startswith("lora_A is zero in 1 of")


def test_messages_stay_short(folder):
    save(folder, KEYS, peft_type="x" * 100_000)
    assert len(refused(folder)) < 1000


def test_a_layout_that_the_shapes_tell(tmp_path):
    weights = random_adapter(TARGETS, 2, 4.0, torch.Generator().manual_seed(0), one_a=True)
    keys = fused_keys(weights, TARGETS, three_dims=True)
    folder = save(tmp_path, keys, r=2, lora_alpha=8)
    found = read_adapter(folder, TARGETS, lora_B_layout="grouped_by_expert")
    assert found.warnings == (
        "lora_B_layout=grouped_by_expert had no effect: the shapes tell here",
    )
    assert read_adapter(folder, TARGETS).warnings == ()


def test_a_module_that_no_adapter_can_change(folder):
    targets = replace(TARGETS, targets=dict(TARGETS.targets))
    targets.targets.pop("model.embed_tokens")
    with pytest.raises(AdapterError, match=r"not as a plain Linear(.|\n)*embed_tokens"):
        read_adapter(folder, targets)


def test_an_embedding_named_as_a_parameter(folder):
    keys = {key.replace("lora_embedding_A", "lora_A.weight"): x for key, x in KEYS.items()}
    save(folder, keys, r=2)
    assert "name it in target_modules" in refused(folder)


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
    monkeypatch.setattr("vexpert.lora.weights_file.READ_BYTES", 1000)
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
