"""What every kernel file needs: how a dot rounds, and the checks of the launchers."""

from functools import cache

import torch
import triton
import triton.language as tl


def dot_precision(dtype: torch.dtype) -> str:
    """float32 must not be cut to TF32: its relative error would be 1e-3, not 1e-7."""
    return "ieee" if dtype == torch.float32 else "tf32"


def check_matrix(name: str, tensor: torch.Tensor) -> None:
    """Assert that columns are adjacent, as kernels assume; rows may have any stride."""
    assert tensor.dim() == 2, (name, tuple(tensor.shape))
    assert tensor.stride(1) == 1 or tensor.shape[1] <= 1, (name, tensor.stride())


def power_of_two(value: int, least: int, most: int) -> int:
    """The smallest power of two that is at least `value`, within bounds that are such powers."""
    return max(least, min(most, 1 << max(value - 1, 0).bit_length()))


def ceil_div(count: int, size: int) -> int:
    """Parts of `size` that hold `count`. triton.cdiv takes ten times as long on the host."""
    return -(-count // size)


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Until here a kernel may run beside the one before it; from here on its writes are seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_release(PDL: tl.constexpr):
    """From here on the next kernel may start, if all programs of this one came so far."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def touch(at):
    """Bring what lies at these addresses to the L1: loaded soon, by programs of this SM."""
    tl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Launch options: PDL tells the kernel, launch_pdl the driver."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@cache  # asked at each launch
def can_use_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: from compute capability 9.0 on."""
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9
