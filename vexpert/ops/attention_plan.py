"""Which shapes of tiles the paged attention kernels run with: data, the first row that fits.

"half" is bfloat16 and float16. Widths of keys and values bound a tile: it lies in shared memory.
Rows of width 128 were measured on one H200; see docs/performance.md. In latent attention a tile of
keys serves as values too, and how many query heads share it bounds the tile: those rows are chosen
by heads, and were compiled for an H200 without register spills, at rank 512 and 64 rotary columns.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.paged_decode import DecodeShape
from vexpert.kernels.paged_prefill import PrefillShape


@dataclass(frozen=True)
class AttentionPlan:
    """One choice."""

    decode: DecodeShape  # few sequences: latency counts
    crowded: DecodeShape  # without any split there are more programs than `decode.programs`
    prefill: PrefillShape
    # A step of decodes and chunks runs both kernels if a context may be this long: the prefill
    # kernel does not split keys, and one long decode would hold up the step.
    split_mixed_from: int = 1024

    def decode_of(self, programs: int) -> DecodeShape:
        """For `programs`: sequences times KV heads."""
        return self.decode if programs <= self.decode.programs else self.crowded


# kind -> (widest head, plan); shapes: keys of a step, least keys of a run, programs, warps, stages
_WIDE, _WIDEST = DecodeShape(64, 256, 132, 4, 2), DecodeShape(32, 256, 132, 4, 2)
_SLOW, _SLOWER = DecodeShape(32, 256, 132, 4, 2), DecodeShape(32, 256, 132, 4, 1)
_SLOWEST = DecodeShape(16, 256, 132, 4, 1)
PLANS = {
    "half": (
        (
            128,
            AttentionPlan(
                DecodeShape(128, 256, 264, 4, 2, pdl=True),
                DecodeShape(64, 256, 264, 4, 2, pdl=True),
                PrefillShape(64, 32, 4, 3, pdl=True),
            ),
        ),
        (256, AttentionPlan(_WIDE, _WIDE, PrefillShape(64, 64, 8, 2))),
        (512, AttentionPlan(_WIDEST, _WIDEST, PrefillShape(32, 32, 8, 1))),
    ),
    "float32": (
        (128, AttentionPlan(_SLOW, _SLOW, PrefillShape(16, 16, 4, 2))),
        (256, AttentionPlan(_SLOWER, _SLOWER, PrefillShape(16, 16, 4, 1))),
        (512, AttentionPlan(_SLOWEST, _SLOWEST, PrefillShape(16, 16, 4, 1))),
    ),
}
# kind -> (most query heads of a KV head, plan)
_FEW, _SOME, _MANY = (
    DecodeShape(64, 256, 264, 4, 2),
    DecodeShape(64, 256, 132, 8, 2),
    DecodeShape(32, 256, 132, 8, 2),
)
_FEW_SLOW, _MANY_SLOW = DecodeShape(16, 256, 132, 4, 1), DecodeShape(16, 256, 132, 8, 1)
_CHUNKS, _SLOW_CHUNKS = PrefillShape(64, 32, 8, 2), PrefillShape(16, 16, 8, 1)
LATENT_PLANS = {
    "half": (
        (16, AttentionPlan(_FEW, _FEW, _CHUNKS)),
        (32, AttentionPlan(_SOME, _SOME, _CHUNKS)),
        (1024, AttentionPlan(_MANY, _MANY, _CHUNKS)),
    ),
    "float32": (
        (16, AttentionPlan(_FEW_SLOW, _FEW_SLOW, _SLOW_CHUNKS)),
        (1024, AttentionPlan(_MANY_SLOW, _MANY_SLOW, _SLOW_CHUNKS)),
    ),
}


@cache
def choose_attention(
    width: int, dtype: torch.dtype, device: torch.device, latent_heads: int = 0
) -> AttentionPlan:
    """For heads of `width`: the larger of d and dv, at most 512.

    latent_heads: query heads of latent attention, at most 1024; 0: it is none.
    """
    kind = "float32" if dtype == torch.float32 else "half"
    rows, size = (LATENT_PLANS, latent_heads) if latent_heads else (PLANS, width)
    plan = next(plan for most, plan in rows[kind] if size <= most)
    if can_use_pdl(device):
        return plan
    return replace(
        plan,
        decode=replace(plan.decode, pdl=False),
        crowded=replace(plan.crowded, pdl=False),
        prefill=replace(plan.prefill, pdl=False),
    )
