"""The tensors of an adapter folder, as views of what its files held when they were read."""

import functools
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import check_regular, read_json
from vexpert.lora.parallel import run_all

SAFETENSORS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLE = "adapter_model.bin"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

Tensors = dict[str, torch.Tensor]

READ_BYTES = 8 << 20  # one read


def read_tensors(folder: Path) -> Tensors:
    """Tensors by key, in memory of their own. AdapterError names the file and what is wrong.

    A weights file may be a symlink (download caches make them); an index may name only files of
    the folder itself.
    """
    if (folder / SAFETENSORS).exists():
        tensors = _read_safetensors(folder / SAFETENSORS)
    elif (folder / INDEX).exists():
        tensors = _read_shards(folder)
    elif (folder / PICKLE).exists():
        tensors = _read_pickle(folder / PICKLE)
    else:
        raise AdapterError(
            f"{folder} has no {SAFETENSORS}, {INDEX} or {PICKLE}: the weights are missing; copy "
            "them beside adapter_config.json"
        )
    check_tensors(str(folder), tensors)
    return tensors


def check_tensors(source: str, tensors: Tensors) -> None:
    """AdapterError for what no tensor of an adapter is: empty, or of a dtype that is not read."""
    if not tensors:
        raise AdapterError(
            f"{source}: the weights file holds no tensor: nothing would be applied; save the "
            "adapter again (sharded training must gather the weights first)"
        )
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise AdapterError(f"{key} has dtype {tensor.dtype}: must be one of {wanted}")
        if tensor.ndim == 0:
            raise AdapterError(f"{key} is a single number: no tensor of a LoRA adapter is")
        if tensor.numel() == 0:
            raise AdapterError(
                f"{key} has shape {list(tensor.shape)}: empty; the rank is 0, or sharded training "
                "did not gather the weights before saving"
            )


def _read_safetensors(path: Path) -> Tensors:
    if not path.is_file():
        raise AdapterError(f"{path} is not a file")
    try:
        with safe_open(path, framework="pt") as file:  # checks the whole header
            keys = file.keys()
            return _views(path, keys) or {key: file.get_tensor(key) for key in keys}
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        raise AdapterError(
            f"{path} is not a readable safetensors file ({error}); it may be truncated, or a link "
            "that was saved as text: copy it again"
        ) from None


def _views(path: Path, keys: list[str]) -> Tensors | None:
    """Tensors as views of the file's bytes; None where offsets or dtypes do not allow that.

    `safe_open` slices its mapping anew for each tensor: 0.1 s for 6,000 tensors; this takes 0.03.
    """
    content = _content(path)
    size = int.from_bytes(bytes(content[:8].tolist()), "little")
    header = json.loads(bytes(content[8 : 8 + size].numpy()))
    flat: dict[str, torch.Tensor] = {}  # all bytes in each dtype
    tensors: Tensors = {}
    for key in keys:
        entry = header[key]
        dtype = _SAFE_DTYPES.get(entry["dtype"])
        start, remainder = divmod(
            8 + size + entry["data_offsets"][0], dtype.itemsize if dtype else 1
        )
        if dtype is None or remainder:
            return None
        if entry["dtype"] not in flat:
            whole = len(content) - len(content) % dtype.itemsize
            flat[entry["dtype"]] = content[:whole].view(dtype)
        shape = entry["shape"]
        tensors[key] = flat[entry["dtype"]].as_strided(shape, _strides(shape), start)
    return tensors


def _content(path: Path) -> torch.Tensor:
    """The bytes of a file in memory of its own, read by several threads.

    Not a mapping: a file that is cut short while it is mapped, or a disk that fails, would kill the
    process, with every other adapter in it.
    """
    with path.open("rb", buffering=0) as file:
        nbytes = os.fstat(file.fileno()).st_size
        content = torch.empty(nbytes, dtype=torch.uint8)
        view: Any = content.numpy()  # a buffer, and slices of it

        def read(start: int) -> None:
            end = min(start + READ_BYTES, nbytes)
            while start < end:
                count = os.preadv(file.fileno(), [view[start:end]], start)
                if count == 0:
                    raise OSError(f"it ended at byte {start} of {nbytes} while it was read")
                start += count

        run_all([functools.partial(read, start) for start in range(0, nbytes, READ_BYTES)])
    return content


def _strides(shape: list[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _read_shards(folder: Path) -> Tensors:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterError(f"{folder / INDEX}: weight_map must be an object of key: file name")
    tensors: Tensors = {}
    for name in sorted({_shard_name(folder, name) for name in weight_map.values()}):
        shard = _read_safetensors(folder / name)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            raise AdapterError(f"{folder}: two shards hold {twice[0]}")
        tensors.update(shard)
    different = sorted(weight_map.keys() ^ tensors.keys())
    if different:
        raise AdapterError(
            f"{folder / INDEX}: the index and the shards differ in {len(different)} keys, first "
            f"{different[0]}; copy the whole adapter again"
        )
    return tensors


def _shard_name(folder: Path, name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise AdapterError(
            f"{folder / INDEX} names the shard {name!r}, outside the adapter's folder: put the "
            "shards beside the index and name them without a path"
        )
    return name


def _read_pickle(path: Path) -> Tensors:
    """A .bin through torch's restricted unpickler, which builds tensors only and runs no code."""
    try:
        check_regular(path)
        if not zipfile.is_zipfile(path):
            raise zipfile.BadZipFile("not the archive that torch.save writes")
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except AdapterError:
        raise
    except (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        RuntimeError,
        OSError,
        EOFError,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AdapterError(
            f"{path} is refused: not a plain file of tensors ({first}); save the adapter as "
            f"{SAFETENSORS}"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()
    ):
        raise AdapterError(f"{path} is not a table of tensors; save it as {SAFETENSORS}")
    return {key: tensor.detach().contiguous() for key, tensor in loaded.items()}
