"""Looks at an adapter without serving it: what is in the files, and what a model makes of it."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vexpert.config import EngineConfig
from vexpert.engine.boot import model_names
from vexpert.errors import AdapterError
from vexpert.lora.build_extras import SUPPORTED, extras_like
from vexpert.lora.halves import check_half_keys
from vexpert.lora.pack import packed_elements
from vexpert.lora.reader import read_adapter
from vexpert.lora.report import AdapterReport, file_facts, file_rows, module_rows, producer
from vexpert.lora.site_extras import plan_extras
from vexpert.lora.source import check_path
from vexpert.lora.types import AdapterWeights, TargetMap

if TYPE_CHECKING:
    from vexpert.models.outline import Outline


def inspect_adapter(
    path: str | Path,
    model: str | None = None,
    *,
    lora_B_layout: str | None = None,
    **options: object,
) -> AdapterReport:
    """What the adapter in folder `path` is; with a `model`, how it would be placed in it.

    `model`: folder or Hugging Face name; its weights are not read, so copies of base weights in
    the file are taken as changed. `options`: those of EngineConfig. A refusal is in the report's
    `error`; ModelError and ConfigError are raised.
    """
    try:
        folder = check_path(path)
    except AdapterError as error:
        return AdapterReport(str(path), None, str(error))
    report = _from_files(folder)
    if model is None:
        return report
    from vexpert.models.outline import read_outline

    config = EngineConfig.from_options(model=model, **options)
    return _placed(report, folder, read_outline(config), config.max_lora_rank, lora_B_layout)


def _placed(
    report: AdapterReport,
    folder: Path,
    outline: "Outline",
    max_rank: int,
    lora_B_layout: str | None,
) -> AdapterReport:
    """`report` with how the adapter in `folder` would be placed in the model of `outline`."""
    report = replace(report, model=outline.name)
    try:
        weights = read_adapter(
            folder,
            outline.targets,
            max_rank=max_rank,
            lora_B_layout=lora_B_layout,
            supported=SUPPORTED,
            model_names=model_names(outline.name),
        )
        nbytes = packed_bytes(weights, outline.targets, outline.dtype)
    except AdapterError as error:
        return replace(report, error=str(error))
    rows = module_rows(weights)
    return replace(
        report,
        error=None,
        formats=weights.formats,
        modules=rows,
        extras=tuple(sorted(weights.extras)),
        rank=max((row.rank for row in rows), default=0),
        device_bytes=nbytes,
        warnings=weights.warnings,
    )


def packed_bytes(weights: AdapterWeights, targets: TargetMap, dtype: torch.dtype) -> int:
    """Bytes that the adapter takes in the arena, padding at its end aside."""
    factors = packed_elements(weights, targets, dtype)
    extras = extras_like(weights, targets)
    return plan_extras(extras, factors, dtype)[1] * dtype.itemsize


def _from_files(folder: Path) -> AdapterReport:
    try:
        config, tensors = file_facts(folder)
    except AdapterError as error:
        return AdapterReport(str(folder), None, str(error))
    return AdapterReport(
        path=str(folder),
        model=None,
        error=_half_error(tensors.keys()),
        producer=producer(config, tensors),
        config=config,
        files=file_rows(tensors),
        file_bytes=sum(x.nbytes for x in tensors.values()),
        warnings=config.warnings,
    )


def _half_error(keys: Collection[str]) -> str | None:
    """What is missing beside the keys, whatever the model."""
    try:
        check_half_keys(keys)
    except AdapterError as error:
        return str(error)
    return None
