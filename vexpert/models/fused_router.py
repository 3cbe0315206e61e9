"""Routers as one product and one launch for scores, top-k and weights."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from vexpert.kernels.norm_router import Router
from vexpert.kernels.router_topk import (
    MAX_EXPERTS,
    SCORES,
    Choice,
    reference_router_topk,
    router_topk,
)
from vexpert.models.fused_record import Call, Records, agree

ROWS = 6  # of the probe
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # logits, weights, ids
BIAS = "e_score_correction_bias"


class FusedRouter:
    """The forward of one router module: hidden [..., H] -> logits, weights and ids [T, .].

    Some give the three in the opposite order. Where the launch before computed the result, it is
    used once, and its logits are scratch.
    """

    def __init__(
        self,
        module: Any,
        choice: Choice,
        product: torch.dtype,
        bias: Callable[[], torch.Tensor | None],
        weights: torch.dtype,
        ids_first: bool,
        pdl: bool,
    ) -> None:
        self.module = module
        self.choice = choice
        self.product = product  # dtype of the logits
        self.bias = bias  # of the choice
        self.weights = weights  # dtype of the weights
        self.ids_first = ids_first
        self.pdl = pdl
        self._ahead: tuple[torch.Tensor, Routed] | None = None

    def set_ahead(self, hidden: torch.Tensor, routed: Routed) -> None:
        """`routed` (logits, weights, ids) is the result for `hidden`, if that comes next."""
        self._ahead = hidden, routed

    @property
    def is_adapted(self) -> bool:
        """Whether an adapter of the step adapts it: then its logits are not its product alone."""
        ask = getattr(self.module, "vexpert_adapted", None)
        return ask is not None and bool(ask())

    def kernel_router(self, dtype: torch.dtype) -> Router:
        """The router for `norm_router`, for hidden states of `dtype`."""
        module = self.module
        rounds = self.product == dtype != torch.float32
        bias = getattr(module, "bias", None)
        return Router(module.weight, bias, self.choice, self.bias(), rounds, self.weights)

    def __call__(self, hidden_states: torch.Tensor, *args: Any) -> Routed:
        ahead, self._ahead = self._ahead, None
        is_known = ahead is not None and ahead[0].data_ptr() == hidden_states.data_ptr()
        logits, weights, ids = ahead[1] if ahead and is_known else self._route(hidden_states)
        return (ids, weights, logits) if self.ids_first else (logits, weights, ids)

    def _route(self, hidden_states: torch.Tensor) -> Routed:
        module = self.module
        x = hidden_states.reshape(-1, hidden_states.shape[-1]).to(self.product)
        bias = getattr(module, "bias", None)
        # One call of F.linear: LoRA on the router adds to its result.
        logits = functional.linear(x, module.weight.to(self.product), bias)
        ids, weights = router_topk(logits, self.bias(), self.choice, self.weights, self.pdl)
        return logits, weights, ids


class _GiveLogits(TorchFunctionMode):
    """While entered, F.linear returns these logits [T, E], and its arguments are kept."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.given: list[dict[str, Any]] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not functional.linear:
            return func(*args, **(kwargs or {}))
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | dict(kwargs or {})
        self.given.append(given)
        return self.logits.to(given["input"].dtype)


def _probe_logits(num_experts: int, device: torch.device) -> torch.Tensor:
    """[ROWS, E] float32, far apart at the top so that no dtype makes two of them equal."""
    generator = torch.Generator().manual_seed(0)
    values = 6.0 * 0.93 ** torch.arange(num_experts) - 2.0
    order = [torch.randperm(num_experts, generator=generator) for _ in range(ROWS)]
    return torch.stack([values[row] for row in order]).to(device)


def _choices(module: Any, bias: Any, top_k: int) -> list[Choice]:
    """The ways in which this router may choose, by the attributes that it has."""
    scale = float(getattr(module, "routed_scaling_factor", 1.0) or 1.0)
    least = float(getattr(module, "norm_min", 0.0))
    groups = getattr(module, "num_group", getattr(module, "n_group", None)) or 1
    kept = getattr(module, "topk_group", None) or groups
    limits = {(1, 1, True), (groups, kept, True), (groups, kept, False)}
    found = []
    for score, renormalise, factor, (count, top, two) in itertools.product(
        SCORES, (True, False), dict.fromkeys((scale, 1.0)), sorted(limits, reverse=True)
    ):
        if score == "chosen" and (renormalise or bias is not None):
            continue
        # Sigmoids may all be 0: their sum must not be.
        add = 1e-20 if score == "sigmoid" and renormalise else 0.0
        rule = (add, least if renormalise else 0.0, count, top, two)
        found.append(Choice(score, top_k, renormalise, factor, *rule))
    return found


def _find_bias(module: Any, call: Call) -> tuple[Callable[..., Any], torch.Tensor | None] | None:
    """Where the bias of the choice comes from, and its value; None: there is more than it."""
    extra = call.args[1:]
    holder = module if hasattr(module, BIAS) else getattr(module, "moe_statics", None)
    if call.kwargs or len(extra) > 1 or (extra and holder is not None):
        return None
    if extra:
        return (lambda: extra[0].view(-1)), extra[0]
    if holder is None:
        return (lambda: None), None
    return (lambda: getattr(holder, BIAS).view(-1)), getattr(holder, BIAS)


@torch.inference_mode()
def recognise_router(
    module: nn.Module, records: Records, pdl: bool, likely: Choice | None = None
) -> FusedRouter | str:
    """`module` fused, or why it is not. `likely`: the choice that is tried first."""
    call = records.only(module)
    weight = module.get_parameter("weight")
    if call is None:
        return "it is not called once"
    if weight.shape[0] > MAX_EXPERTS or not weight.is_contiguous():
        return "its weight is too large, or not contiguous"
    found = _find_bias(module, call)
    if found is None:
        return "it takes more than hidden states and a bias"
    getter, bias = found
    logits = _probe_logits(weight.shape[0], weight.device)
    if bias is None:
        return _match(module, call, logits, getter, pdl, likely)
    saved = bias.data
    try:  # with a random bias: a checkpoint's zeros would not show what it does
        drawn = torch.randn(bias.shape, generator=torch.Generator().manual_seed(1))
        bias.data = drawn.to(bias.device, bias.dtype)
        return _match(module, call, logits, getter, pdl, likely)
    finally:
        bias.data = saved


def _match(
    module: nn.Module,
    call: Call,
    logits: torch.Tensor,
    getter: Callable[..., Any],
    pdl: bool,
    likely: Choice | None,
) -> FusedRouter | str:
    """The router whose results for `logits` are those of the module."""
    weight, extra = module.get_parameter("weight"), call.args[1:]
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(ROWS, weight.shape[1], generator=generator).to(call.hidden)
    with _GiveLogits(logits) as mode:
        output = module.forward(hidden, *extra)
    if len(mode.given) != 1 or not _is_plain(mode.given[0], hidden, module):
        return "its logits are not one product of its input"
    if not (isinstance(output, tuple) and len(output) == 3):
        return "it does not give logits, weights and ids"
    ids_first = output[0].dtype == torch.int64
    ids, weights = output[0] if ids_first else output[2], output[1]
    if ids.dtype != torch.int64 or weights.shape != ids.shape:
        return "it does not give logits, weights and ids"
    product = mode.given[0]["input"].dtype
    bias = getter()
    seen = logits.to(product)
    ways = _choices(module, bias, ids.shape[1])
    for choice in sorted(ways, key=lambda way: way != likely):
        if not _same(reference_router_topk(seen, bias, choice), (ids, weights)):
            continue
        if _same(router_topk(seen, bias, choice, weights.dtype, pdl), (ids, weights)):
            return FusedRouter(module, choice, product, getter, weights.dtype, ids_first, pdl)
    return "it chooses in another way"


def _is_plain(given: dict[str, Any], hidden: torch.Tensor, module: nn.Module) -> bool:
    """Whether F.linear was called with input and weight as they are, but for their dtype."""
    bias = given.get("bias")
    x, weight = given["input"], given["weight"]
    return (
        bias is getattr(module, "bias", None)
        and x.dtype == weight.dtype
        and torch.equal(x, hidden.to(x.dtype))
        and torch.equal(weight, module.get_parameter("weight").to(weight.dtype))
    )


def _same(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> bool:
    """Whether ids are equal, in whatever order, and weights go with them."""
    ours, theirs = (pair[0].argsort(1) for pair in (got, want))
    if not torch.equal(got[0].gather(1, ours), want[0].gather(1, theirs)):
        return False
    weights = got[1].to(want[1].dtype).gather(1, ours)
    return agree(weights, want[1].gather(1, theirs))
