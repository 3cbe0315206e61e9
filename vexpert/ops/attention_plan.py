"""Which shapes of tiles the paged attention kernels run with: data, the first row that fits.

"half" is bfloat16 and float16. Widths of keys and values bound a tile: it lies in shared memory.
Rows of width 128 were measured on one H200; see docs/performance.md.
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


@cache
def choose_attention(width: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """For heads of `width`: the larger of d and dv, at most 512."""
    rows = PLANS["float32" if dtype == torch.float32 else "half"]
    plan = next(plan for most, plan in rows if width <= most)
    if can_use_pdl(device):
        return plan
    return replace(
        plan,
        decode=replace(plan.decode, pdl=False),
        crowded=replace(plan.crowded, pdl=False),
        prefill=replace(plan.prefill, pdl=False),
    )
