"""Where an adapter comes from: its files, whether they changed, and how they are read."""

import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.build_extras import build_extras
from vexpert.lora.chat_template import ChatTemplate, read_template
from vexpert.lora.files import check_folder
from vexpert.lora.formats.full import BaseWeight
from vexpert.lora.json_files import check_regular
from vexpert.lora.memory_source import AdapterTensors, adapter_tensors
from vexpert.lora.opening import limited
from vexpert.lora.pack import Allocate, PackedAdapter, pack
from vexpert.lora.types import AdapterWeights, TargetMap
from vexpert.lora.weights_file import Book, booking

FILE_TYPES = {".json", ".safetensors", ".bin", ".pt", ".jinja"}


class AdapterReader(Protocol):
    """Reads a folder, or tensors, into canonical form, or raises AdapterError."""

    def __call__(
        self,
        path: Path | AdapterTensors,
        targets: TargetMap,
        *,
        max_rank: int,
        lora_B_layout: str | None = None,
    ) -> AdapterWeights: ...


@dataclass(frozen=True)
class Source:
    """Where the weights of one version are."""

    place: Path | AdapterTensors
    lora_b_layout: str | None = None

    def __str__(self) -> str:
        return str(self.place)

    @property
    def folder(self) -> Path | None:
        return self.place if isinstance(self.place, Path) else None

    def forget_tensors(self) -> None:
        """They are packed: let go of the memory of whoever gave them."""
        if isinstance(self.place, AdapterTensors):
            self.place.tensors.clear()

    def observe(self) -> "Fingerprint":
        """What tells one state of the files from another; empty without files."""
        return () if self.folder is None else observe(self.folder)


FileState = tuple[str, int, int, int, int]  # name, bytes, mtime and ctime in ns, inode
Fingerprint = tuple[FileState, ...]


def fingerprint(path: Path) -> Fingerprint:
    """What tells one state of the files in folder `path` from another; empty if there are none.

    AdapterError for a file that no adapter has, such as a pipe.
    """
    files = [file for file in sorted(path.iterdir()) if file.suffix in FILE_TYPES]
    for file in files:
        check_regular(file)
    stats = [(file.name, file.stat()) for file in files]
    return tuple(file_state(name, stat) for name, stat in stats)


def file_state(name: str, stat: os.stat_result) -> FileState:
    """What changes when a file is written again, even with its size and time restored."""
    return name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def check_path(path: Any) -> Path:
    """`path` as a Path; AdapterError if it can name no file."""
    if not isinstance(path, str | Path) or "\0" in str(path):
        raise AdapterError(f"adapter path {shown(path)}: give the path of a folder, as a string")
    if not str(path):
        raise AdapterError("the adapter path is empty: give the path of a folder")
    return Path(path)


def folder_source(path: Any, layout: str | None) -> Source:
    """A folder, told by its absolute path: who reads that may be elsewhere. AdapterError.

    Links stay as they are, and ".." too, because one behind a link leads elsewhere than it seems.
    """
    return Source(check_path(path).absolute(), layout)


def make_source(path: Any, tensors: Any, config: Any, layout: str | None) -> Source:
    """The source that a caller means: a folder, or tensors with their config. AdapterError."""
    if tensors is None and config is None:
        return folder_source(path, layout)
    if path is not None:
        raise AdapterError("give a path, or tensors with their config, not both")
    return Source(adapter_tensors(tensors, config), layout)


def check_switches(**given: object) -> None:
    """AdapterError for one that is no bool: the word "no" would be as good as True."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise AdapterError(f"{name}={shown(value)}: use True or False")


def observe(path: Path) -> Fingerprint:
    """`fingerprint`, with an AdapterError when the files cannot be looked at."""
    try:
        check_folder(path)
        return fingerprint(path)
    except AdapterError:
        raise
    except (OSError, ValueError) as error:  # ValueError: no name of a file, a lone surrogate
        cause = getattr(error, "strerror", None) or str(error)
        raise AdapterError(
            f"adapter path {shown(str(path), 300)} cannot be read: {cause}"
        ) from None


@dataclass(frozen=True)
class HostCopy:
    """An adapter packed in host memory."""

    packed: PackedAdapter
    files: Fingerprint
    warnings: tuple[str, ...]
    template: ChatTemplate


class BaseWeightNeeded(Exception):
    """An adapter can only be read where the base model's weights are."""


def no_base_weight(name: str) -> torch.Tensor | None:
    """Stands for the base model's weights where there are none: raises BaseWeightNeeded."""
    raise BaseWeightNeeded(name)


def changed(source: Source) -> AdapterError:
    """The error of a version whose files are others now."""
    return AdapterError(
        f"the files of {str(source)!r} changed or vanished since the adapter was loaded; "
        "load it again with load_inplace to serve what is there now"
    )


@dataclass(frozen=True)
class AdapterLoader:
    """Reads and packs adapters of one model; safe to call from many threads at once."""

    reader: AdapterReader
    targets: TargetMap
    max_rank: int
    dtype: torch.dtype
    base_weight: BaseWeight | None = None  # needed where the reader lets extras pass
    roots: tuple[str, ...] = ()  # what lies below them is read from below them; empty: anything

    def portable(self) -> "AdapterLoader":
        """The same without the base weights, for a process that does not have them."""
        reader = self.reader
        if isinstance(reader, functools.partial) and "base_weight" in reader.keywords:
            reader = functools.partial(reader, base_weight=no_base_weight)
        return replace(self, reader=reader, base_weight=no_base_weight)

    def load(
        self,
        source: Source,
        allocate: Allocate,
        expected: Fingerprint | None = None,
        book: Book | None = None,
    ) -> HostCopy:
        """Read and pack `source`; AdapterError if its files differ from `expected`, when given.

        `book` is called with the bytes of each weights file before they are read; `allocate` once,
        when the packed size is known.
        """
        inside = limited(source.folder or Path(), self.roots if source.folder else ())
        with inside, booking(book):
            return self._load(source, allocate, expected)

    def _load(self, source: Source, allocate: Allocate, expected: Fingerprint | None) -> HostCopy:
        files = source.observe()
        if expected is not None and files != expected:
            raise changed(source)
        template = ChatTemplate() if source.folder is None else read_template(source.folder)
        weights = self.reader(
            source.place,
            self.targets,
            max_rank=self.max_rank,
            lora_B_layout=source.lora_b_layout,
        )
        packed = self._pack(weights, allocate)
        if source.observe() != files:
            raise AdapterError(f"the files of {str(source)!r} changed while read; load it again")
        return HostCopy(packed, files, weights.warnings, template)

    def read_template(
        self, source: Source, expected: Fingerprint | None
    ) -> tuple[ChatTemplate, Fingerprint]:
        """The template of `source` alone, and the state of its files. AdapterError as in `load`."""
        if source.folder is None:
            return ChatTemplate(), ()
        with limited(source.folder, self.roots):
            files = source.observe()
            template = read_template(source.folder)
            if files != (source.observe() if expected is None else expected):
                raise changed(source)
            return template, files

    def _pack(self, weights: AdapterWeights, allocate: Allocate) -> PackedAdapter:
        extras = {}
        if weights.extras:
            assert self.base_weight is not None, "extras need the base weights"
            extras = build_extras(weights, self.targets, self.base_weight)
        return pack(weights, self.targets, self.dtype, extras=extras, allocate=allocate)
