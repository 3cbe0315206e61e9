"""The header of a safetensors file: 8 bytes of length, JSON of names, dtypes, shapes and offsets.

Read here, and not through the library's memory mapping: a file that is cut short while it is mapped
kills the process.
"""

import functools
from math import prod
from typing import Any, NamedTuple

import torch

from vexpert.config import shown
from vexpert.lora.json_files import parse_json

HEAD_BYTES = 8  # in front of the header: its length
MOST_BYTES = 100_000_000  # of a header, as the format has it
KEPT_BYTES = 8 << 20  # of one that is kept: adapters of one training code differ in numbers alone
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class Entry(NamedTuple):
    """Where one tensor lies: bytes [start, end) of the file."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def header_size(head: bytes, nbytes: int) -> int:
    """Bytes of the header behind `head`, the first HEAD_BYTES of a file of `nbytes`. ValueError."""
    if len(head) < HEAD_BYTES:
        raise ValueError("too short for a header")
    size = int.from_bytes(head, "little")
    if size > MOST_BYTES:
        raise ValueError("header too large")
    if HEAD_BYTES + size > nbytes:
        raise ValueError("the header ends behind the file")
    return size


def parse_header(header: bytes, nbytes: int) -> tuple[Entry, ...]:
    """Tensors of a file of `nbytes` with this header, in order of their places.

    ValueError for anything but a header whose tensors cover the rest of the file, each byte once.
    """
    return (_again if len(header) <= KEPT_BYTES else _parse)(header, nbytes)


def _parse(header: bytes, nbytes: int) -> tuple[Entry, ...]:
    base = HEAD_BYTES + len(header)
    raw = parse_json(header.decode("utf-8"))
    if not isinstance(raw, dict):
        raise ValueError("the header is no JSON object")
    raw.pop("__metadata__", None)
    entries = [_entry(key, value, base) for key, value in raw.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = base
    for entry in entries:
        if entry.start != position:
            raise ValueError(f"the bytes of {shown(entry.key)} do not begin where others end")
        position = entry.end
    if position != nbytes:
        raise ValueError(f"its tensors end at byte {position}, the file at {nbytes}")
    return tuple(entries)


_again = functools.lru_cache(maxsize=2)(_parse)


def _entry(key: str, value: Any, base: int) -> Entry:
    fields = value if isinstance(value, dict) else {}
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"{shown(key)} has no shape, or no data_offsets")
    dtype = DTYPES.get(str(fields.get("dtype")))
    if dtype is None:
        raise ValueError(f"{shown(key)} has dtype {shown(fields.get('dtype'))}")
    start, end = offsets
    if end - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{shown(key)}: dtype, shape and data_offsets disagree")
    return Entry(key, dtype, shape, base + start, base + end)


def _counts(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
