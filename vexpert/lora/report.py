"""What an adapter folder holds, as data: from the files alone, or placed in a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from vexpert.config import printable
from vexpert.lora.adapter_config import AdapterConfig, read_config
from vexpert.lora.files import Tensors, read_tensors
from vexpert.lora.key_lists import HOLE, grouped, split_numbers
from vexpert.lora.keys import parse_key
from vexpert.lora.types import AdapterWeights, ExpertsFactors, Factors
from vexpert.lora.versions import possible_eras


@dataclass(frozen=True)
class FileRow:
    """Tensors of one kind of module and one part, over all layers and experts."""

    module: str  # numbers of layers and experts as sets: layers.{0-3}; N where that is not exact
    part: str  # A, B, ..., or the name of a full parameter
    count: int
    shapes: tuple[tuple[int, ...], ...]  # distinct ones
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class ModuleRow:
    """One adapted projection of one module of the model."""

    module: str
    projection: str  # gate, up, down; "" of a Linear or an embedding
    rank: int
    scale: float
    inputs: int
    outputs: int
    experts: int  # 0: no routed experts
    shared: str  # which factor all experts share: "", "A", "B", "A and B"


@dataclass(frozen=True)
class AdapterReport:
    """Everything that is known of an adapter; `error` says why it would be refused."""

    path: str
    model: str | None  # None: the file alone was looked at
    error: str | None
    producer: str = "unknown"
    config: AdapterConfig | None = None
    files: tuple[FileRow, ...] = ()
    file_bytes: int = 0  # of all tensors
    formats: tuple[str, ...] = ()
    modules: tuple[ModuleRow, ...] = ()
    extras: tuple[str, ...] = ()
    rank: int = 0  # the largest
    device_bytes: int | None = None  # None: unknown without a model that takes it
    warnings: tuple[str, ...] = ()

    @property
    def is_refused(self) -> bool:
        return self.error is not None


def file_facts(folder: Path) -> tuple[AdapterConfig, Tensors]:
    """Config and tensors of an adapter folder; AdapterError if they cannot be read."""
    return read_config(folder), read_tensors(folder)


def file_rows(tensors: Tensors) -> tuple[FileRow, ...]:
    """The tensors grouped by module and part."""
    groups: dict[tuple[str, str], list[tuple[str, torch.Tensor]]] = {}
    for key, tensor in tensors.items():
        module, part = _module(key, tensor)
        groups.setdefault((split_numbers(module)[0], part), []).append((module, tensor))
    return tuple(
        FileRow(
            _together(general, [module for module, _ in found]),
            part,
            len(found),
            tuple(sorted({tuple(x.shape) for _, x in found})),
            tuple(sorted({str(x.dtype).removeprefix("torch.") for _, x in found})),
        )
        for (general, part), found in groups.items()
    )


def _together(general: str, modules: list[str]) -> str:
    groups = grouped(modules)
    return groups[0].text if len(groups) == 1 else printable(general.replace(HOLE, "N"))


def _module(key: str, tensor: torch.Tensor) -> tuple[str, str]:
    piece = parse_key(key, tensor)
    module, part = (key, "not understood") if piece is None else (piece.module, piece.part)
    if piece is not None and part == "param":
        part = piece.param
    return module, printable(part)


def producer(config: AdapterConfig, tensors: Tensors) -> str:
    """Who wrote the files, as far as they show it."""
    keys = tensors.keys()
    if any(".attn." in key or "unembed_tokens" in key for key in keys):
        return "Tinker"
    if config.unsloth:
        return "Unsloth, " + _peft(config)
    if config.version is not None and "peft_version" not in config.fields:
        return f"NeMo AutoModel, layout of PEFT {config.version}"
    return _peft(config)


def _peft(config: AdapterConfig) -> str:
    if config.version is not None:
        return f"PEFT {config.version}"
    eras = " or ".join(possible_eras(None, config.fields))
    return f"no version stated; layout of PEFT {eras}"


def module_rows(weights: AdapterWeights) -> tuple[ModuleRow, ...]:
    """One row for each pair of factors, in the order of the model's names."""
    return tuple(
        row for path in sorted(weights.modules, key=_natural) for row in _rows(weights, path)
    )


def _rows(weights: AdapterWeights, path: str) -> Iterator[ModuleRow]:
    found = weights.modules[path]
    if isinstance(found, Factors):
        yield _row(path, "", found, 0)
        return
    for projection in ("gate", "up", "down"):
        pair = getattr(found, projection)
        if pair is not None:
            yield _row(path, projection, pair, _experts(found))


def _experts(found: ExpertsFactors) -> int:
    pairs = [pair for pair in (found.gate, found.up, found.down) if pair is not None]
    return max(max(pair.a.shape[0], pair.b.shape[0]) for pair in pairs)


def _row(path: str, projection: str, pair: Factors, experts: int) -> ModuleRow:
    sides = [name for name, x in (("A", pair.a), ("B", pair.b)) if experts > 1 and len(x) == 1]
    return ModuleRow(
        path,
        projection,
        pair.rank,
        pair.scale,
        pair.a.shape[2],
        pair.b.shape[1],
        experts,
        " and ".join(sides),
    )


def _natural(path: str) -> list[tuple[int, str]]:
    """Layer 10 behind layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in path.split(".")]
