"""The operations behind LoRA and routed experts, who offers them, and who is chosen.

Semantics of LoRA: y[p] += B[s, e] @ (A[s, e] @ x[p]) for row p with slot s >= 0 and an expert e on
this rank. All other rows are left as they are, bit for bit, and cost nothing.
"""

import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol

import torch

from vexpert.errors import UnsupportedError
from vexpert.kernels.dense_factors import DenseDelta, HeadColumns
from vexpert.log import get_logger, log_once
from vexpert.ops.routing import Arrangement, Routing
from vexpert.ops.types import (
    ExpertsLora,
    ExpertsTensors,
    Finish,
    LoraSite,
    PackedLora,
    SiteTable,
)

__all__ = ["Arrangement", "LoraBackend", "Routing", "check_operands", "select_backend"]

logger = get_logger(__name__)


class FusedExperts(Protocol):
    """A layer's routed experts as one operation, LoRA included."""

    def __call__(
        self,
        hidden: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        lora: ExpertsLora | None,
        finish: Finish | None = None,
    ) -> torch.Tensor:
        """[T, H] of hidden [T, H], in its dtype; topk_ids [T, K] int64, topk_weights [T, K] float.

        Sentinels add nothing. With a finish, that is filled in, and the result is its total.
        """

    def order(self, topk_ids: torch.Tensor, lora: ExpertsLora | None) -> object:
        """What the layer launches before its products: to be timed alone."""


class LoraBackend(Protocol):
    """One implementation. Rows: P; a Routing or Arrangement goes back to the backend it is from.

    x, y, weight, bias and the tables' arenas have one dtype, of those that `CAPABILITIES` names;
    y of a dense layer may also be float32, and gets deltas unrounded on a GPU. Slots, experts and
    x_rows are int64; routing weights are of any float dtype.
    """

    name: str
    can_fuse: bool  # whether it has whole layers of routed experts as one operation
    can_pack: bool  # whether `packed_linear` beats one product for each site

    def route(
        self, slots: torch.Tensor, experts: torch.Tensor | None, num_experts: int, num_slots: int
    ) -> Routing:
        """Group rows with slots [P] and experts [P] int64 (None: a dense layer)."""

    def shrink(
        self,
        x: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """h [P, site.max_rank] float32 = A x[x_rows]; x [P or R, in] in the arena's dtype.

        Inactive rows, and columns from the slot's rank on, are unspecified.
        """

    def expand(
        self,
        h: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        y: torch.Tensor,
        fuse_add_to_output: bool = True,
        add_output_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Add B h to y [P, out] in place and return y; h [P, site.max_rank] float32 of `shrink`.

        Columns of y are adjacent, rows need not be. add_output_mask [P] bool: rows that may change
        (None: all). Without fuse_add_to_output y stays as it is, and the deltas return in a new
        tensor, zero where there is none.
        """

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> None:
        """Shrink and expand: add B A x[x_rows] to y [P, out] in place; x [P or R, in]."""

    def apply_per_adapter(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        slots: torch.Tensor,
        experts: torch.Tensor | None,
        active_slots: tuple[int, ...],
        x_rows: torch.Tensor | None = None,
    ) -> None:
        """The same as `route` and `apply`, one adapter after another: the classic path."""

    def packed_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """y [R, out] = W x + bias + each site's B A x; x [R, in], weight [out, in], bias [out].

        y is in `out_dtype`: x's (None), or float32, unrounded. `out` is the sum of the sites'
        outputs. Which product computes a step depends on its shape and on whether there is `lora`,
        not on slots: rows without an adapter get W x + bias.
        """

    def deferred_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora,
        tiles: bool = False,
    ) -> tuple[torch.Tensor, DenseDelta | None]:
        """y as of `packed_linear`, and what the kernel that reads it has still to add; or None.

        `tiles`: that kernel can do tiles of many rows.
        """

    def add_by_head(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        lora: PackedLora,
        columns: HeadColumns,
        of_keys: bool,
    ) -> None:
        """Deltas of a Linear that expands latents, in the absorbed form; y changes in place.

        Bk[h], Bv[h]: B's rows of head h's keys and values; one site, whose output `columns` tell.
        of_keys: y[t, h] += A^T (Bk[h]^T x[t, h]), x [T, H, key], y [T, H, in]. Otherwise:
        y[t, h] += Bv[h] (A x[t, h]), x [T, H, in], y [T, H, value]. All in the arena's dtype;
        last dimensions are adjacent, the others may have any strides.
        """

    def fuse_experts(self, experts: ExpertsTensors) -> FusedExperts | None:
        """The layer as one operation; None: this backend runs it step by step."""

    def prepare_weight(self, weight: torch.Tensor, is_transposed: bool) -> None:
        """Once at load: store an experts' weight as `grouped_gemm` likes it. In place, same values.

        Pass the Parameter itself: its `data` may be replaced.
        """

    def arrange(self, topk_ids: torch.Tensor, num_experts: int) -> Arrangement:
        """Order the pairs of topk_ids [T, K] int64 for the three operations below."""

    def grouped_gemm(
        self,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arrangement: Arrangement,
        is_transposed: bool,
    ) -> torch.Tensor:
        """y [P, N] = W[e] x[x_rows] + bias[e]; rows of sentinels are unspecified; x [P or R, K].

        weight [E, N, K], or [E, K, N] when transposed; bias [E, N].
        """

    def combine(
        self, y: torch.Tensor, weights: torch.Tensor | None, arrangement: Arrangement
    ) -> torch.Tensor:
        """out [T, H] = sum over k, in order, of weights [T, K] times y [P, H] of pair (t, k).

        Sentinels are left out; weights None: ones. Sums in float32; the result has y's dtype.
        """


@dataclass(frozen=True)
class Capability:
    """What a backend runs, as data."""

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    packages: tuple[str, ...] = ()


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITIES = {
    "numba": Capability(("cpu",), (torch.float32,), ("numba",)),
    "torch": Capability(("cpu",), FLOATS),
    "triton": Capability(("cuda",), FLOATS, ("triton",)),
    # Triton's interpreter runs the same kernels on a CPU, for tests. Its dot multiplies bfloat16 as
    # the integers it keeps them in (seen in 3.9), so that dtype is left out.
    "triton interpreter": Capability(("cpu",), (torch.float32, torch.float16), ("triton",)),
}
NAMES = ("torch", "numba", "triton")
# Of each device's backends, the first that can run: "auto".
PREFERRED = {"cpu": ("numba", "torch"), "cuda": ("triton",)}


def unsupported_because(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why backend `name` cannot run there, or None."""
    interpreted = name == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    capability = CAPABILITIES["triton interpreter" if interpreted else name]
    if device.type not in capability.device_types and not (interpreted and device.type == "cuda"):
        return f"it runs on {', '.join(capability.device_types)}"
    if dtype not in capability.dtypes:
        return f"it computes in {', '.join(str(known) for known in capability.dtypes)}"
    missing = [name for name in capability.packages if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def select_backend(
    name: str,
    device: torch.device | str,
    dtype: torch.dtype,
    kernel_plans: str | None = None,
    batch_invariant: bool = False,
) -> LoraBackend:
    """Backend `name`, or for "auto" the device's own; the choice is logged once.

    kernel_plans: a file of plans to try before the packaged ones. batch_invariant: a row's result
    does not depend on the others, bit for bit. Raises UnsupportedError, with the reason, when the
    backend cannot run `dtype` on `device`, or cannot do one of these; ConfigError for a bad file.
    """
    device = torch.device(device)
    chosen = _first_able(device, dtype) if name == "auto" else name
    if chosen not in NAMES:
        raise UnsupportedError(f"LoRA backend {name!r} is unknown; use auto, {', '.join(NAMES)}")
    reason = unsupported_because(chosen, device, dtype)
    if reason is not None:
        raise UnsupportedError(
            f"LoRA backend {chosen!r} cannot run {dtype} on {device}: {reason}; choose another "
            "lora_backend, device or dtype"
        )
    log_once(logger, f"LoRA backend: {chosen} for {dtype} on {device} (asked for: {name})")
    if chosen == "triton":
        from vexpert.ops.plans import load_plans
        from vexpert.ops.triton_backend import TritonBackend

        return TritonBackend(load_plans(kernel_plans, batch_invariant))
    _check_library(chosen, kernel_plans, batch_invariant)
    return _build(chosen)


def _check_library(chosen: str, kernel_plans: str | None, batch_invariant: bool) -> None:
    """Backends that leave products to a library cannot say how it computes them."""
    if batch_invariant:
        raise UnsupportedError(
            f"batch_invariant=True: LoRA backend {chosen!r} leaves products to PyTorch's libraries,"
            " which add up in another order for another number of rows; use a GPU, and the backend"
            " triton"
        )
    if kernel_plans is not None:
        raise UnsupportedError(
            f"kernel_plans={kernel_plans!r}: plans are for the Triton kernels, and LoRA backend"
            f" {chosen!r} has none; leave the option out"
        )


def _first_able(device: torch.device, dtype: torch.dtype) -> str:
    names = PREFERRED.get(device.type, ("torch",))
    able = (name for name in names if unsupported_because(name, device, dtype) is None)
    return next(able, names[-1])


def _build(name: str) -> LoraBackend:
    if name == "torch":
        from vexpert.ops.torch_backend import TorchBackend

        return TorchBackend()
    from vexpert.ops.numba_backend import NumbaBackend

    return NumbaBackend()


def check_operands(
    backend: str,
    x: torch.Tensor,
    y: torch.Tensor,
    site: LoraSite,
    table: SiteTable,
    num_rows: int,
) -> None:
    """Raise UnsupportedError unless x [*, in] and y [num_rows, out] fit the site and its arena.

    y may also be float32.
    """
    arena = table.arena
    dtype, is_cuda = arena.dtype, arena.is_cuda
    fits = (  # written for speed: once per site and step
        x.dtype is dtype
        and (y.dtype is dtype or y.dtype is torch.float32)
        and x.is_cuda is is_cuda
        and y.is_cuda is is_cuda
        and x.dim() == y.dim() == 2
        and x.size(1) == site.in_features
        and y.size(0) == num_rows
        and y.size(1) == site.out_features
    )
    if not fits:
        raise UnsupportedError(
            f"LoRA backend {backend!r}, {site.name}: x {tuple(x.shape)} {x.dtype} {x.device} and y "
            f"{tuple(y.shape)} {y.dtype} {y.device} do not fit {num_rows} rows of "
            f"[{site.in_features} -> {site.out_features}] in {arena.dtype} on {arena.device}"
        )
