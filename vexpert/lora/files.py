"""The tensors of an adapter folder, as views of what its files held when they were read."""

import os
import pickle
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from vexpert.config import first_line, printable, shown
from vexpert.errors import AdapterError
from vexpert.lora.header import Entry
from vexpert.lora.json_files import MAX_INDEX_BYTES, check_pointer, check_regular, read_json
from vexpert.lora.key_lists import counted, key_lines
from vexpert.lora.opening import open_file
from vexpert.lora.weights_file import POINTER_BYTES, book_bytes, read_weights

SAFETENSORS = "adapter_model.safetensors"
INDEX = "adapter_model.safetensors.index.json"
PICKLE = "adapter_model.bin"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Tensors = dict[str, torch.Tensor]


def check_folder(path: Path) -> None:
    """AdapterError unless `path` is a folder. Raises OSError."""
    if path.is_dir():
        return
    what = "not a folder" if path.exists() else "no such folder"
    raise AdapterError(
        f"{shown(str(path), 300)}: {what}; give an adapter's folder, with adapter_config.json and "
        "its weights"
    )


def read_tensors(folder: Path) -> Tensors:
    """Tensors by key, in memory of their own. AdapterError names the file and what is wrong.

    A weights file may be a symlink (download caches make them); an index may name only files of
    the folder itself.
    """
    if _exists(folder / SAFETENSORS):
        tensors = _read_safetensors(folder / SAFETENSORS)
    elif _exists(folder / INDEX):
        tensors = _read_shards(folder)
    elif _exists(folder / PICKLE):
        tensors = _read_pickle(folder / PICKLE)
    else:
        shards = sorted(path.name for path in folder.glob("adapter_model-*-of-*.safetensors"))
        if shards:
            raise AdapterError(
                f"{folder} has {counted(len(shards), 'shard')}, first {shards[0]}, but no {INDEX}: "
                "copy it there too"
            )
        raise AdapterError(
            f"{folder} has no {SAFETENSORS}, {INDEX} or {PICKLE}: the weights are missing; copy "
            "them beside adapter_config.json"
        )
    check_tensors(str(folder), tensors)
    return tensors


def _exists(path: Path) -> bool:
    try:
        if path.is_symlink():
            check_regular(path)
        return path.exists()
    except OSError as error:  # a folder that may not be searched
        raise _unreadable(path, error) from None


def check_tensors(source: str, tensors: Tensors) -> None:
    """AdapterError for what no tensor of an adapter is: empty, or of a dtype that is not read."""
    if not tensors:
        raise AdapterError(
            f"{source}: the weights file holds no tensor: nothing would be applied; save the "
            "adapter again (sharded training must gather the weights first)"
        )
    for name, tensor in tensors.items():
        key = printable(name)
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
    try:
        if not path.is_file():
            what = "not a file" if path.exists() else "missing"
            raise AdapterError(f"{path} is {what}: copy the whole adapter again")
        return _views(*read_weights(path))
    except AdapterError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(
            f"{path} is not a readable safetensors file ({error}); it may be truncated, or a link "
            "that was saved as text: copy it again"
        ) from None


def _unreadable(path: Path, error: OSError) -> AdapterError:
    return AdapterError(f"{shown(str(path), 300)} cannot be read: {error.strerror or error}")


def _views(content: torch.Tensor, entries: Iterable[Entry]) -> Tensors:
    """Tensors as views of a file's bytes [N]; copies of those whose place is not aligned."""
    flat: dict[torch.dtype, torch.Tensor] = {}  # all bytes in each dtype
    tensors: Tensors = {}
    for key, dtype, shape, start, end in entries:
        if start % dtype.itemsize:
            tensors[key] = content[start:end].clone().view(dtype).view(shape)
            continue
        if dtype not in flat:
            flat[dtype] = content[: len(content) - len(content) % dtype.itemsize].view(dtype)
        # One call for each of thousands of tensors; slices and views are four.
        tensors[key] = flat[dtype].as_strided(shape, _strides(shape), start // dtype.itemsize)
    return tensors


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def _read_shards(folder: Path) -> Tensors:
    weight_map = read_json(folder / INDEX, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AdapterError(f"{folder / INDEX}: weight_map must be an object of key: file name")
    tensors: Tensors = {}
    for name in sorted({_shard_name(folder, name) for name in weight_map.values()}):
        shard = _read_safetensors(folder / name)
        twice = sorted(tensors.keys() & shard.keys())
        if twice:
            raise AdapterError(f"{folder}: two shards hold {printable(twice[0])}")
        tensors.update(shard)
    different = sorted(weight_map.keys() ^ tensors.keys())
    if different:
        raise AdapterError(
            f"{folder / INDEX}: the index and the shards differ in "
            f"{counted(len(different), 'key')}:\n{key_lines(different)}\n"
            "copy the whole adapter again"
        )
    return tensors


def _shard_name(folder: Path, name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise AdapterError(
            f"{folder / INDEX} names the shard {shown(name)}, outside the adapter's folder: put "
            "the shards beside the index and name them without a path"
        )
    return name


def _read_pickle(path: Path) -> Tensors:
    """A .bin through torch's restricted unpickler, which builds tensors only and runs no code."""
    try:
        check_regular(path)
        with open_file(path) as file:
            check_pointer(path, file.read(POINTER_BYTES))
            book_bytes(_unpacked_bytes(path, file))
            file.seek(0)
            loaded = torch.load(file, map_location="cpu", weights_only=True)
    except AdapterError:
        raise
    except PermissionError as error:
        raise _unreadable(path, error) from None
    except pickle.UnpicklingError:  # its text tells how to run the file's code
        raise AdapterError(
            f"{path} is refused: it holds Python objects beside tensors, or is broken; save the "
            f"adapter as {SAFETENSORS}"
        ) from None
    except (
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
        raise AdapterError(
            f"{path} is refused: not a plain file of tensors ({first_line(error)}); save the "
            f"adapter as {SAFETENSORS}"
        ) from None
    if not isinstance(loaded, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in loaded.items()
    ):
        raise AdapterError(f"{path} is not a table of tensors; save it as {SAFETENSORS}")
    return {key: _plain(key, tensor) for key, tensor in loaded.items()}


def _unpacked_bytes(path: Path, file: BinaryIO) -> int:
    """What the parts of an archive take in memory; AdapterError if more than they are in the file.

    torch.save compresses nothing: a part that grows when it is read was made to.
    """
    if not zipfile.is_zipfile(file):
        raise zipfile.BadZipFile("not the archive that torch.save writes")
    with zipfile.ZipFile(file) as archive:
        nbytes = sum(part.file_size for part in archive.infolist())
    size = os.fstat(file.fileno()).st_size
    if nbytes > size:
        raise AdapterError(
            f"{path} is refused: it has {size} bytes and would take {nbytes} when read; save the "
            f"adapter as {SAFETENSORS}"
        )
    return nbytes


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as rows in memory; AdapterError for kinds of tensors that are none."""
    key = printable(name)
    dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or tensor.device.type != "cpu":
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise AdapterError(
            f"{key} is a {kind} tensor of {tensor.dtype} on {tensor.device}, not plain numbers; "
            f"save the adapter as {SAFETENSORS}"
        )
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise AdapterError(
            f"{key} has shape {list(tensor.shape)}, but the file holds fewer numbers (an expanded "
            f"tensor); save the adapter as {SAFETENSORS}"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
