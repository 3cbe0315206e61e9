"""Which shapes of tiles the paged attention kernels run with: data, the first row that fits.

"half" is bfloat16 and float16. Widths of keys and values bound a tile: it lies in shared memory.
Rows of width 128 were measured on one H200; see docs/performance.md.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton

from vexpert.kernels.paged_decode import DecodeShape
from vexpert.kernels.paged_prefill import PrefillShape


@dataclass(frozen=True)
class AttentionPlan:
    """One choice."""

    decode: DecodeShape
    prefill: PrefillShape
    # A step of decodes and chunks runs both kernels if a context may be this long: the prefill
    # kernel does not split keys, and one long decode would hold up the step.
    split_mixed_from: int = 1024


# kind -> (widest padded head, plan)
PLANS = {
    "half": (
        (128, AttentionPlan(DecodeShape(64, 256, 264, 4, 5), PrefillShape(128, 64, 8, 3))),
        (256, AttentionPlan(DecodeShape(64, 256, 132, 4, 2), PrefillShape(64, 64, 8, 2))),
        (512, AttentionPlan(DecodeShape(32, 256, 132, 4, 2), PrefillShape(32, 32, 8, 1))),
    ),
    "float32": (
        (128, AttentionPlan(DecodeShape(32, 256, 132, 4, 2), PrefillShape(16, 16, 4, 2))),
        (256, AttentionPlan(DecodeShape(32, 256, 132, 4, 1), PrefillShape(16, 16, 4, 1))),
        (512, AttentionPlan(DecodeShape(16, 256, 132, 4, 1), PrefillShape(16, 16, 4, 1))),
    ),
}


@cache
def choose_attention(width: int, dtype: torch.dtype, device: torch.device) -> AttentionPlan:
    """For heads of `width`: the larger of d and dv, at most 512."""
    can_use_pdl = _can_use_pdl(device)
    rows = PLANS["float32" if dtype == torch.float32 else "half"]
    plan = next(plan for most, plan in rows if width <= most)
    return replace(
        plan,
        decode=replace(plan.decode, pdl=plan.decode.pdl and can_use_pdl),
        prefill=replace(plan.prefill, pdl=plan.prefill.pdl and can_use_pdl),
    )


def _can_use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: from compute capability 9.0 on."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    cuda: Any = torch.cuda
    return bool(cuda.get_device_capability(device)[0] >= 9)
