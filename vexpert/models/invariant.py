"""Steps whose rows do not depend on each other: what `batch_invariant` asks of a model.

PyTorch's library adds up a product's terms in another order for another number of rows. So inside
`InvariantProducts`, products of rows and weights run as one Triton kernel with one tile for all.
The other parts are the backend's fixed plans, one attention kernel for all queries
(`ops/attention.py`), and fused norms, whose sums are of one row each.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vexpert.errors import UnsupportedError
from vexpert.models.experts import ExpertsLayer
from vexpert.models.fuse import Fusions
from vexpert.models.probe import Probe
from vexpert.moe.runner import MoeRunner
from vexpert.ops.backend import LoraBackend

Function = Callable[..., Any]
MATMULS: tuple[Function, ...] = (
    torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.__matmul__,
    torch.Tensor.mm, torch.Tensor.bmm,
)  # fmt: skip
OTHERS: tuple[Function, ...] = (
    torch.addmm, torch.baddbmm, torch.einsum, torch.Tensor.addmm, torch.Tensor.baddbmm,
    torch.conv1d, functional.scaled_dot_product_attention,
)  # fmt: skip
REMEDY = "leave batch_invariant out for this model"


class InvariantProducts(TorchFunctionMode):
    """While entered, products of float tensors do not depend on how many rows they have.

    Raises UnsupportedError for one that is neither rows times a weight nor an outer product.
    """

    def __init__(self, backend: LoraBackend) -> None:
        super().__init__()
        self.backend = backend

    def __torch_function__(
        self,
        func: Function,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.linear:
            return self._linear(*args, **given)
        if func in MATMULS:
            return self._matmul(*args, **given)
        if func in OTHERS:
            raise UnsupportedError(f"batch_invariant: {func.__name__} is not covered; {REMEDY}")
        return func(*args, **given)

    def _linear(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        rows = input.reshape(-1, input.shape[-1])
        y = self.backend.packed_linear(rows, weight, bias, None, out_dtype)
        return y.view(*input.shape[:-1], weight.shape[0])

    def _matmul(
        self, input: torch.Tensor, other: torch.Tensor, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`out_dtype`: what `torch.mm` alone can be asked for."""
        if out_dtype is None and input.shape[-1] == 1 and other.dim() > 1:
            return input * other  # as in rotary embeddings; nothing is added up
        if other.dim() != 2 or input.dim() < 2:
            shapes = f"{tuple(input.shape)} by {tuple(other.shape)}"
            raise UnsupportedError(
                f"batch_invariant: a product of {shapes} is not rows by a weight; {REMEDY}"
            )
        return self._linear(input, other.t(), None, out_dtype)


def make_invariant(seen: Probe, fusions: Fusions, layers: Mapping[str, ExpertsLayer]) -> None:
    """Have fused parts run the same for any number of tokens, in place.

    Raises UnsupportedError for a model of which a part cannot.
    """
    if any(call.latent is not None for call in seen.calls):
        raise UnsupportedError(
            "batch_invariant: latent attention multiplies by kv_b_proj head by head in PyTorch's"
            f" library, which adds up in another order for another number of rows; {REMEDY}"
        )
    for path, layer in layers.items():
        if not isinstance(layer.runner, MoeRunner) or layer.runner.fused is None:
            raise UnsupportedError(
                f"batch_invariant: {path} cannot run as one operation, see the log; {REMEDY}"
            )
    for norm in fusions.unfused_norms:
        raise UnsupportedError(
            f"batch_invariant: PyTorch computes {type(norm).__name__}, whose sums depend on how"
            f" many rows there are; {REMEDY}"
        )
    for attention in fusions.attentions.values():
        attention.heads = replace(attention.heads, batch_invariant=True)
    for fused in fusions.layers.values():
        fused.scratch = None  # few tokens' router in the launch of the norm: another product
