"""What the readers of all formats share: the config, the options, and checks of factors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.checks import LARGEST, LARGEST_CHANGE, is_zero, largest_of, require_finite
from vexpert.lora.keys import Piece
from vexpert.lora.types import ExpertsTarget, Factors


@dataclass
class Context:
    """State of reading one adapter. The notes become warnings when all is read."""

    config: AdapterConfig
    layout: str | None  # order of a fused lora_B's columns, if anything says it
    max_rank: int | None
    largest: float = math.inf  # magnitude in the whole file; Inf: not known
    warnings: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    examples: list[tuple[str, str]] = field(default_factory=list)  # (extra, where it is)
    pairs: int = 0
    zero: list[str] = field(default_factory=list)  # names of pairs whose B is zero
    zero_a: list[str] = field(default_factory=list)  # names of pairs whose A is zero
    other_ranks: dict[str, None] = field(default_factory=dict)  # rank is not what the config says
    assumed: dict[str, None] = field(default_factory=dict)  # of the order of patterns
    idle: dict[str, None] = field(default_factory=dict)  # names whose alpha is 0, by some pattern
    is_layout_used: bool = False  # some lora_B has a layout that its shape does not tell

    def note_format(self, name: str) -> None:
        """Remember that the file holds this format."""
        if name not in self.formats:
            self.formats.append(name)

    def scale(self, name: str, rank: int) -> float:
        """Scale of the pair that the file calls `name`; `rank` is the one in the file."""
        stated = self.config.patterns.ranks(name)
        if None not in stated and rank not in stated:
            wanted = " or ".join(str(r) for r in stated)
            self.other_ranks[f"{name}: {rank}, config {wanted}"] = None
        notes: list[str] = []
        scale = self.config.scale(name, rank, notes)
        self.assumed.update(dict.fromkeys(notes))
        if scale == 0.0 and self.config.alpha_pattern:
            self.idle[name] = None
        return scale

    def linear_name(self, module: str) -> str:
        """What patterns match of a Linear, router or embedding that the file calls `module`.

        PEFT wraps those that target_parameters names by parameter, and matches its whole name.
        """
        weight = f"{module}.weight"
        named = any(
            weight == name or weight.endswith(f".{name}") for name in self.config.target_parameters
        )
        return weight if named else module

    def check(self, name: str, a: torch.Tensor, bs: Sequence[torch.Tensor], scale: float) -> None:
        """Refuse a pair with NaN, Inf or too large a rank or values; count it, note zeros.

        `bs` are the parts of one B (the halves of gate and up).
        """
        self.check_rank(name, a.shape[1])
        self.check_values(name, a, bs, scale)
        self.count_pair(name, [a], bs)

    def check_values(
        self, name: str, a: torch.Tensor, bs: Sequence[torch.Tensor], scale: float
    ) -> None:
        """Refuse NaN, Inf, and what is too large once scaled; a is [E or 1, r, in]."""
        if not self.is_in_range(scale, a.shape[1]):
            require_finite(f"{name}.lora_A", a)
            for b in bs:
                require_finite(f"{name}.lora_B", b, scale)
                _check_change(name, a, b, scale)

    def is_in_range(self, scale: float, rank: int) -> bool:
        """Whether no pair of this rank in the file can be too large once `scale` is applied."""
        factor = max(1.0, abs(scale))
        change = self.largest * self.largest * factor * rank
        return self.largest * factor <= LARGEST and change <= LARGEST_CHANGE

    def check_rank(self, name: str, rank: int) -> None:
        """Refuse too large a rank."""
        if self.max_rank is not None and rank > self.max_rank:
            raise AdapterError(
                f"{name} has rank {rank}, above the largest accepted, {self.max_rank}; start with "
                f"max_lora_rank={rank} (--max-lora-rank {rank})"
            )

    def count_pair(self, name: str, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> None:
        """Count a pair and note a zero A or B, whose parts are given."""
        self.pairs += 1
        if all(is_zero(x) for x in b):
            self.zero.append(name)
        elif all(is_zero(x) for x in a):
            self.zero_a.append(name)

    def factors(self, name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> Factors:
        """Checked factors: a [E or 1, r, in], b [E or 1, out, r]."""
        self.check(name, a, [b], scale)
        return Factors(a, b, scale)


def _check_change(name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Refuse a pair whose product no model can compute with."""
    largest_a, largest_b, rank = largest_of(a), largest_of(b), a.shape[1]
    change = largest_a * largest_b * abs(scale) * rank
    if not change <= LARGEST_CHANGE:
        raise AdapterError(
            f"{name} may change weights by {change:.3g}: scale {scale:g}, rank {rank}, "
            f"lora_A up to {largest_a:.3g} in {_dtype(a)}, lora_B up to {largest_b:.3g} in "
            f"{_dtype(b)}. Beyond {LARGEST_CHANGE:g} no answer would be finite: check "
            "lora_alpha, alpha_pattern and the training"
        )


def _dtype(x: torch.Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_dora(path: str, is_flag: bool, is_there: bool) -> None:
    """AdapterError unless use_dora and the magnitudes in the file agree."""
    if is_flag == is_there:
        return
    remedy = (
        "the file is incomplete, save the adapter again; if it was trained without DoRA, write "
        '"use_dora": false'
        if is_flag
        else 'write "use_dora": true if it was trained with DoRA, else remove these tensors'
    )
    raise AdapterError(
        f"{path}: use_dora is {str(is_flag).lower()} in adapter_config.json, but "
        f"lora_magnitude_vector is {'missing' if is_flag else 'in the file'}: {remedy}"
    )


def check_bias(path: str, config: AdapterConfig) -> None:
    """AdapterError where lora_bias promises what routed experts cannot have."""
    if config.lora_bias:
        raise AdapterError(
            f"{path}: lora_bias is true in adapter_config.json, but lora_B.bias is missing: the "
            "file is incomplete, save the adapter again; if it was trained without, write "
            '"lora_bias": false'
        )


def check_wrapped(path: str, config: AdapterConfig) -> None:
    """AdapterError for what PEFT refuses to combine with its wrappers of parameters."""
    check_dora(path, config.use_dora, False)
    check_bias(path, config)


def dimensions(target: ExpertsTarget, projection: str) -> tuple[int, int]:
    """(in, out) of one expert's projection: gate_up, gate, up or down."""
    hidden, inner = target.hidden_size, target.intermediate_size
    if projection == "down":
        return inner, hidden
    return hidden, 2 * inner if projection == "gate_up" and target.has_gate else inner


def split_rows(target: ExpertsTarget, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(gate, up) of x [..., 2I, :], whose rows follow the base weight's order. Views."""
    if target.is_interleaved:
        return x[..., 0::2, :], x[..., 1::2, :]
    size = target.intermediate_size
    return x[..., :size, :], x[..., size:, :]


def shapes(*pieces: Piece) -> str:
    """Keys and shapes, for messages."""
    return ", ".join(f"{piece.key} {list(piece.tensor.shape)}" for piece in pieces)
