"""What callers hold between two operations; each backend has its own kind of both."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """Rows grouped by virtual expert, `slot * num_experts + expert`; inactive rows left out."""

    num_rows: int


@dataclass(frozen=True)
class Arrangement:
    """The order in which a backend wants a layer's pairs, and its grouping by expert."""

    pair: torch.Tensor  # [P] int64: which of the T * K pairs each row is, t * K + k
    token: torch.Tensor  # [P] int64: row of the layer's input
    expert: torch.Tensor  # [P] int64: local expert, or a sentinel (< 0 or >= num_experts)
    num_tokens: int
