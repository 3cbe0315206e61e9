"""Reads an adapter folder: files -> placed pieces -> canonical factors, or one AdapterError."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from vexpert.config import shown
from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import (
    INPUT_EMBEDDING,
    AdapterConfig,
    check_layout,
    parse_config,
    read_config,
)
from vexpert.lora.checks import largest_in
from vexpert.lora.extras import NOTHING, require_supported
from vexpert.lora.files import Tensors, check_folder, read_tensors
from vexpert.lora.formats import fused, per_expert
from vexpert.lora.formats.context import Context
from vexpert.lora.formats.full import BaseWeight, FullParameters, read_full
from vexpert.lora.formats.linear import read_linear
from vexpert.lora.formats.tokens import read_tokens
from vexpert.lora.halves import check_halves
from vexpert.lora.key_lists import counted, grouped
from vexpert.lora.keys import Piece, Slots
from vexpert.lora.memory_source import AdapterTensors
from vexpert.lora.placing import Placed, place
from vexpert.lora.promises import Found, check_promises, ends
from vexpert.lora.types import (
    AdapterWeights,
    ExpertsFactors,
    ExpertsMagnitude,
    ExpertsTarget,
    Factors,
    LinearTarget,
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
    model_names: tuple[str, ...] = (),
) -> AdapterWeights:
    """The adapter in folder `path` in canonical form, on the host, in memory of its own.

    `path` may be tensors with their config instead, which then may share memory with the result.
    `lora_B_layout`: order of a fused lora_B's columns where the file does not say.
    `supported`: extras (`vexpert.lora.extras.EXTRAS`) that the caller can apply.
    `base_weight`: the base model's parameter by name, to tell unchanged copies in the file from
    trained ones; without it copies under LoRA are taken as unchanged, with a warning.
    `model_names`: of the model served, to warn where the adapter's config names another one.

    AdapterError: anything is missing, broken, not understood, or for another model; nothing is
    ever left out.
    """
    source = path if isinstance(path, AdapterTensors) else Path(path)
    try:
        config, tensors = _open(source, targets)
        context = Context(
            config, _layout(config, lora_B_layout), max_rank, largest_in(tensors.values())
        )
        context.warnings += [*config.warnings, *_other_base(config, model_names)]
        weights = _read(tensors, targets, context, base_weight)
        _check_layout_used(context, lora_B_layout)
        require_supported(weights.extras, supported, context.examples)
    except AdapterError as error:
        known = str(error).startswith(str(source))  # a file's error names its path
        raise AdapterError(_encodable(str(error) if known else f"{source}: {error}")) from error
    return replace(weights, warnings=tuple(map(_encodable, _warnings(context))))


def _encodable(text: str) -> str:
    """`text` with escapes for what UTF-8 cannot hold, such as half a surrogate pair in a name."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _open(source: Path | AdapterTensors, targets: TargetMap) -> tuple[AdapterConfig, Tensors]:
    """Config, with the names that mean the model's own, and tensors."""
    config, tensors = _open_files(source)
    _check_base_class(config, targets)
    table = dict(config.token_indices)
    if INPUT_EMBEDDING in table:
        table[targets.input_embedding.rpartition(".")[2]] = table.pop(INPUT_EMBEDDING)
    return replace(config, token_indices=table), tensors


def _open_files(source: Path | AdapterTensors) -> tuple[AdapterConfig, Tensors]:
    if isinstance(source, AdapterTensors):
        return parse_config(source.config), source.checked()
    check_folder(source)
    return read_config(source), read_tensors(source)


def _read(
    tensors: Tensors, targets: TargetMap, context: Context, base_weight: BaseWeight | None
) -> AdapterWeights:
    """Everything but the warnings, which are in `context`."""
    placed = place(tensors, targets)
    check_halves(placed)
    reading = _Reading(targets, context)
    reading.read(placed)
    full = read_full(placed.full, targets, base_weight, context)
    context.examples += full.examples
    _check_once(reading, full)
    found = Found(reading.modules, set(reading.tokens), full.names, placed.factors)
    _check_tying(context.config, targets, found)
    context.warnings += check_promises(context.config, targets, found)
    return AdapterWeights(
        modules=reading.modules,
        formats=tuple(context.formats),
        extras=frozenset(reading.extras | full.extras),
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
        self.parameters = targets.parameters.keys()
        self.context = context
        self.modules: dict[str, Factors | ExpertsFactors] = {}
        self.magnitude: dict[str, torch.Tensor] = {}
        self.expert_magnitude: dict[str, ExpertsMagnitude] = {}
        self.bias: dict[str, torch.Tensor] = {}
        self.tokens: dict[str, TokenRows] = {}
        self.extras: set[str] = set()

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
        if isinstance(target, LinearTarget) and f"{path}.bias" in self.parameters:
            self.context.warnings.append(
                f"{path} has a bias and trained token rows: the bias is added here; PEFT leaves it "
                "out of the logits while such an adapter is active"
            )

    def _experts(self, target: ExpertsTarget, slots: Slots) -> None:
        factors, magnitudes = per_expert.read_experts(target, slots, self.context)
        self.modules[target.path] = ExpertsFactors(**factors)
        if magnitudes:
            self.expert_magnitude[target.path] = ExpertsMagnitude(**magnitudes)
            self.extras.add("expert_dora")
            self.context.examples.append(("expert_dora", f"{target.path}: lora_magnitude_vector"))

    def _extra(self, kind: str, piece: Piece) -> None:
        self.extras.add(kind)
        self.context.examples.append((kind, piece.key))


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
    if not context.is_layout_used:
        if option is not None or (config.layout is not None and "fused experts" in context.formats):
            reason = "the shapes tell" if "fused experts" in context.formats else "no fused experts"
            context.warnings.append(
                f"lora_B_layout={option or config.layout} had no effect: {reason} here"
            )
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


def _other_base(config: AdapterConfig, model_names: tuple[str, ...]) -> list[str]:
    """A warning where the config names another base model than the one served."""
    named, served = _short(config.base_model), [_short(name) for name in model_names]
    if not named or not any(served) or named in served:
        return []
    return [
        f"adapter_config.json names the base model {shown(config.base_model)}, but "
        f"{shown(model_names[-1])} is served: right only if both have the same weights"
    ]


def _short(name: str) -> str:
    """The last part of a model's name or folder; of a folder in a download cache, the name."""
    cached = re.search(r"models--([^/]*)/snapshots/", name)
    last = cached[1].rpartition("--")[2] if cached else name.rstrip("/").rpartition("/")[2]
    return last.casefold()


def _check_once(reading: _Reading, full: FullParameters) -> None:
    """There is something, and no module is given twice."""
    for name in full.values:
        path, _, param = name.rpartition(".")
        if param == "weight" and (path in reading.modules or path in reading.tokens):
            raise AdapterError(
                f"{path} has factors or token rows and another full weight in one file: which one "
                "counts is unknown; save the adapter again"
            )
    if not (reading.modules or full.names or reading.tokens):
        raise AdapterError("the file holds no factors: nothing would be applied")


def _check_tying(config: AdapterConfig, targets: TargetMap, found: Found) -> None:
    """Trained rows are shared by tied modules anyway, and without any there is nothing to share."""
    adapted = {*found.modules, *found.full_modules}
    shared = [path for path in (targets.input_embedding, *targets.tied) if ends(adapted, path)]
    if config.ensure_weight_tying and targets.tied and shared:
        raise AdapterError(
            f"ensure_weight_tying=true with an adapted {shared[0]}, whose weight is tied, is not "
            "supported; merge the adapter into the base model"
        )


def _some(names: list[str]) -> str:
    """The first groups of names, for a warning."""
    groups = [group.text for group in grouped(names)]
    return ", ".join(groups[:3]) + (", ..." if len(groups) > 3 else "")


def _unused_patterns(config: AdapterConfig) -> list[str]:
    """A warning for each field with patterns that match nothing in the file."""
    found = []
    for field, patterns in config.patterns.unused().items():
        names = ", ".join(map(shown, patterns[:5])) + (", ..." if len(patterns) > 5 else "")
        found.append(
            f"adapter_config.json: {field}: {names} {'match' if len(patterns) > 1 else 'matches'} "
            "no module with factors in the file: without effect"
        )
    return found


def _warnings(context: Context) -> tuple[str, ...]:
    """Everything worth telling, one sentence each."""
    found = [*context.warnings, *_unused_patterns(context.config)]
    if context.zero and len(context.zero) == context.pairs:
        found.append("every lora_B is zero: the adapter changes nothing (never trained?)")
    elif context.zero:
        found.append(
            f"lora_B is zero in {len(context.zero)} of {context.pairs} pairs, "
            f"{_some(context.zero)} (a shard that was not gathered before saving?)"
        )
    if context.zero_a:
        found.append(
            f"lora_A is zero in {len(context.zero_a)} of {context.pairs} pairs, "
            f"{_some(context.zero_a)}: they change nothing (a shard that was not gathered?)"
        )
    if context.idle:
        found.append(
            f"lora_alpha and alpha_pattern give {counted(len(context.idle), 'module')} of the file "
            f"an alpha of 0, {_some([*context.idle])}: they change nothing"
        )
    if context.assumed:
        more = len(context.assumed) - 1
        found.append(next(iter(context.assumed)) + (f" ({more} more like this)" if more else ""))
    if context.other_ranks:
        found.append(
            f"{counted(len(context.other_ranks), 'rank')} unlike adapter_config.json, first "
            f"{next(iter(context.other_ranks))}; the file counts, alpha is divided by its rank"
        )
    return tuple(found)
