"""Reads an adapter folder: files -> placed pieces -> canonical factors, or one AdapterError."""

import re
from collections.abc import Iterable
from pathlib import Path

import torch

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig, check_layout, parse_config, read_config
from vexpert.lora.checks import largest_in
from vexpert.lora.extras import NOTHING, require_supported
from vexpert.lora.files import Tensors, read_tensors
from vexpert.lora.formats import fused, per_expert
from vexpert.lora.formats.context import Context
from vexpert.lora.formats.full import BaseWeight, FullParameters, read_full
from vexpert.lora.formats.linear import read_linear
from vexpert.lora.formats.tokens import read_tokens
from vexpert.lora.keys import Piece, Slots
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.placing import Placed, place
from vexpert.lora.types import (
    AdapterWeights,
    ExpertsFactors,
    ExpertsMagnitude,
    ExpertsTarget,
    Factors,
    TargetMap,
    TokenRows,
)
from vexpert.lora.versions import is_pefts_own


def read_adapter(
    path: Path | AdapterTensors,
    targets: TargetMap,
    *,
    max_rank: int | None = None,
    lora_B_layout: str | None = None,
    supported: frozenset[str] = NOTHING,
    base_weight: BaseWeight | None = None,
) -> AdapterWeights:
    """The adapter in folder `path` in canonical form, on the host, in memory of its own.

    `path` may be tensors with their config instead, which then may share memory with the result.
    `lora_B_layout`: order of a fused lora_B's columns where the file does not say.
    `supported`: extras (`vexpert.lora.extras.EXTRAS`) that the caller can apply.
    `base_weight`: the base model's parameter by name, to tell unchanged copies in the file from
    trained ones; without it copies under LoRA are taken as unchanged, with a warning.

    AdapterError: anything is missing, broken, not understood, or for another model; nothing is
    ever left out.
    """
    source = path if isinstance(path, AdapterTensors) else Path(path)
    try:
        return _read(source, targets, max_rank, lora_B_layout, supported, base_weight)
    except AdapterError as error:
        raise AdapterError(f"adapter {source}: {error}") from error


def _open(source: Path | AdapterTensors) -> tuple[AdapterConfig, Tensors]:
    if isinstance(source, AdapterTensors):
        return parse_config(source.config), source.checked()
    if not source.is_dir():
        raise AdapterError("no such folder; give a local folder with adapter_config.json")
    return read_config(source), read_tensors(source)


def _read(
    source: Path | AdapterTensors,
    targets: TargetMap,
    max_rank: int | None,
    layout: str | None,
    supported: frozenset[str],
    base_weight: BaseWeight | None,
) -> AdapterWeights:
    config, tensors = _open(source)
    _check_base_class(config, targets)
    context = Context(config, _layout(config, layout), max_rank, largest_in(tensors.values()))
    context.warnings += config.warnings
    placed = place(tensors, targets)
    reading = _Reading(targets, context)
    reading.read(placed)
    _check_layout_used(context, layout)
    full = read_full(placed.full, targets, base_weight, context)
    reading.extras |= full.extras
    reading.examples += full.examples
    _check_whole(reading, full, config, targets)
    require_supported(frozenset(reading.extras), supported, reading.examples)
    return AdapterWeights(
        modules=reading.modules,
        warnings=_warnings(context),
        formats=tuple(context.formats),
        extras=frozenset(reading.extras),
        magnitude=reading.magnitude,
        expert_magnitude=reading.expert_magnitude,
        bias=reading.bias,
        full=full.values,
        tokens=reading.tokens,
    )


class _Reading:
    """Results of one read as they come together."""

    def __init__(self, targets: TargetMap, context: Context) -> None:
        self.targets = targets.targets
        self.context = context
        self.modules: dict[str, Factors | ExpertsFactors] = {}
        self.magnitude: dict[str, torch.Tensor] = {}
        self.expert_magnitude: dict[str, ExpertsMagnitude] = {}
        self.bias: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, TokenRows] = {}
        self.extras: set[str] = set()
        self.examples: list[str] = []

    def read(self, placed: Placed) -> None:
        for path, parts in placed.linear.items():
            self._linear(path, parts)
        for path, piece in placed.tokens.items():
            self._tokens(path, piece)
        pairs: list[fused.FusedPair] = []
        for path, slots in placed.experts.items():
            target = self.targets[path]
            assert isinstance(target, ExpertsTarget)
            own = fused.take_pairs(target, slots, self.context)
            pairs += own
            if not own:
                self._experts(target, slots)
        self.modules.update(fused.read_fused(pairs, self.context))

    def _linear(self, path: str, parts: dict[str, Piece]) -> None:
        target = self.targets[path]
        assert not isinstance(target, ExpertsTarget)
        result = read_linear(target, parts, self.context)
        self.modules[path] = result.factors
        if result.bias is not None:
            self.bias[path] = result.bias
            self._extra("bias", parts["B.bias"])
        if result.magnitude is not None:
            self.magnitude[path] = result.magnitude
            self._extra("dora", parts["magnitude"])

    def _tokens(self, path: str, piece: Piece) -> None:
        target = self.targets[path]
        assert not isinstance(target, ExpertsTarget)
        self.tokens[path] = read_tokens(target, piece, self.context.config)
        self._extra("tokens", piece)

    def _experts(self, target: ExpertsTarget, slots: Slots) -> None:
        factors, magnitudes = per_expert.read_experts(target, slots, self.context)
        self.modules[target.path] = ExpertsFactors(**factors)
        if magnitudes:
            self.expert_magnitude[target.path] = ExpertsMagnitude(**magnitudes)
            self.extras.add("expert_dora")
            self.examples.append(f"{target.path}: lora_magnitude_vector")

    def _extra(self, kind: str, piece: Piece) -> None:
        self.extras.add(kind)
        self.examples.append(piece.key)


def _layout(config: AdapterConfig, option: str | None) -> str | None:
    """Order of a fused lora_B's columns: the file's mark or the option; both must agree."""
    check_layout(option, "lora_B_layout")
    if option is not None and config.layout is not None and option != config.layout:
        raise AdapterError(
            f"lora_B_layout={option!r} was asked for, but adapter_config.json says "
            f"{config.layout!r}; leave the option out"
        )
    return option or config.layout


def _check_layout_used(context: Context, option: str | None) -> None:
    """Tell where the order of lora_B's columns was an assumption, or the option had no use."""
    config = context.config
    if "fused experts" not in context.formats:
        if option is not None:
            context.warnings.append(f"lora_B_layout={option} had no effect: no fused experts here")
        return
    if context.layout is not None or (is_pefts_own(config.fields) and not config.unsloth):
        return
    if config.unsloth:
        reason = "the config shows Unsloth, which grouped them by expert before 2026-09"
    elif config.version is None:
        reason = "the config is not PEFT's own, and some exporters group them by expert"
    else:
        return
    context.warnings.append(
        f"lora_B's columns read in PEFT's order, rank_major: {reason}; if so, load with "
        "lora_B_layout=grouped_by_expert"
    )


def _check_base_class(config: AdapterConfig, targets: TargetMap) -> None:
    """The class the adapter was trained on, where the config says it, must be the model's."""
    if config.base_class is not None and _family(config.base_class) != _family(
        targets.architecture
    ):
        raise AdapterError(
            f"adapter_config.json says base_model_class={config.base_class}, the model is "
            f"{targets.architecture}: load the adapter on its own base model"
        )


def _family(name: str) -> str:
    return re.sub(r"(For[A-Z].*|Model|LMHeadModel)$", "", name)


def _check_whole(
    reading: _Reading, full: FullParameters, config: AdapterConfig, targets: TargetMap
) -> None:
    """Nothing that the config promises is missing, and no module is given twice."""
    for name in full.values:
        path, _, param = name.rpartition(".")
        if param == "weight" and (path in reading.modules or path in reading.tokens):
            raise AdapterError(
                f"{path} has factors or token rows and another full weight in one file: which one "
                "counts is unknown; save the adapter again"
            )
    if not (reading.modules or full.modules or reading.tokens):
        raise AdapterError("the file holds no factors: nothing would be applied")
    for field, names, found in (
        ("modules_to_save", config.modules_to_save, full.modules),
        ("trainable_token_indices", tuple(config.token_indices), set(reading.tokens)),
    ):
        for name in names:
            if _ends(targets.targets, name) and not _ends(found, name):
                raise AdapterError(
                    f"adapter_config.json: {field} names {name}, but its tensors are not in the "
                    "file: it is incomplete; save the adapter again"
                )
    adapted = {*reading.modules, *reading.tokens, *full.modules}
    if config.ensure_weight_tying and (_ends(adapted, "embed_tokens") or _ends(adapted, "lm_head")):
        raise AdapterError(
            "ensure_weight_tying=true with an adapted embedding or lm_head is not supported; merge "
            "the adapter into the base model"
        )


def _ends(paths: Iterable[str], name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path in paths)


def _warnings(context: Context) -> tuple[str, ...]:
    """Everything worth telling, one sentence each."""
    found = list(context.warnings)
    if context.zero and len(context.zero) == context.pairs:
        found.append("every lora_B is zero: the adapter changes nothing (never trained?)")
    elif context.zero:
        found.append(
            f"lora_B is zero in {len(context.zero)} of {context.pairs} pairs, first "
            f"{context.zero[0]} (a shard that was not gathered before saving?)"
        )
    if context.other_ranks:
        found.append(
            f"{len(context.other_ranks)} ranks in the file differ from adapter_config.json, first "
            f"{context.other_ranks[0]}; the file counts, alpha is divided by its rank"
        )
    return tuple(found)
