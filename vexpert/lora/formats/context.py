"""What the readers of all formats share: the config, the options, and checks of factors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from vexpert.errors import AdapterError
from vexpert.lora.adapter_config import AdapterConfig
from vexpert.lora.checks import is_zero, require_finite
from vexpert.lora.keys import Piece
from vexpert.lora.types import ExpertsTarget, Factors


@dataclass
class Context:
    """State of reading one adapter. The notes become warnings when all is read."""

    config: AdapterConfig
    layout: str | None  # order of a fused lora_B's columns, if anything says it
    max_rank: int | None
    is_finite: bool = False  # the whole file was checked: no tensor holds NaN or Inf
    warnings: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    pairs: int = 0
    zero: list[str] = field(default_factory=list)  # names of pairs whose B is zero
    other_ranks: list[str] = field(default_factory=list)  # rank is not what the config says

    def note_format(self, name: str) -> None:
        """Remember that the file holds this format."""
        if name not in self.formats:
            self.formats.append(name)

    def scale(self, name: str, rank: int) -> float:
        """Scale of the pair that the file calls `name`; `rank` is the one in the file."""
        stated = self.config.rank(name)
        if stated is not None and stated != rank:
            self.other_ranks.append(f"{name}: {rank}, config {stated}")
        return self.config.scale(name, rank)

    def check(self, name: str, a: torch.Tensor, bs: Sequence[torch.Tensor]) -> None:
        """Refuse a pair with NaN, Inf or too large a rank; count it and note a zero B.

        `bs` are the parts of one B (the halves of gate and up).
        """
        self.check_rank(name, a.shape[1])
        if not self.is_finite:
            require_finite(f"{name}.lora_A", a)
            for b in bs:
                require_finite(f"{name}.lora_B", b)
        self.count_pair(name, bs)

    def check_rank(self, name: str, rank: int) -> None:
        """Refuse too large a rank."""
        if self.max_rank is not None and rank > self.max_rank:
            raise AdapterError(
                f"{name} has rank {rank}, above the largest accepted, {self.max_rank}; start with "
                f"max_lora_rank={rank} (--max-lora-rank {rank})"
            )

    def count_pair(self, name: str, bs: Sequence[torch.Tensor]) -> None:
        """Count a pair and note a zero B, whose parts are `bs`."""
        self.pairs += 1
        if all(is_zero(b) for b in bs):
            self.zero.append(name)

    def factors(self, name: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> Factors:
        """Checked factors: a [E or 1, r, in], b [E or 1, out, r]."""
        self.check(name, a, [b])
        return Factors(a, b, scale)


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
