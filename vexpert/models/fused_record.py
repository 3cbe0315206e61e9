"""One pass over a loaded model that records what every module was given and gave.

What is fused later is recognised from these records alone: by which tensor went where, and by
recomputing a module's results from its inputs. Attention's stand-in returns random values, experts
run for real.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

NAME = "vexpert-record"
POSITIONS = (0, 1, 2, 9, 30)  # of the tokens: small ones, and some at which rotations differ


@dataclass
class Call:
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None

    @property
    def hidden(self) -> Any:
        """The first input."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()), None)

    @property
    def result(self) -> Any:
        """The output, or the first of several."""
        return self.output[0] if isinstance(self.output, tuple) else self.output


@dataclass
class AttentionInputs:
    """What a module gave to attention, in the model's dtype, and the options."""

    query: torch.Tensor  # [1, Hq, T, width]
    key: torch.Tensor  # [1, Hkv, T, width]
    value: torch.Tensor  # [1, Hkv, T, width of value]
    options: dict[str, Any]
    output: torch.Tensor  # [1, T, Hq, width of value]


class Records:
    """Calls by module, in the order in which they ended; stands in for the cache as well."""

    is_compileable = False

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: dict[nn.Module, list[Call]] = {}
        self.attention: dict[nn.Module, AttentionInputs] = {}

    def only(self, module: nn.Module) -> Call | None:
        """The one call of `module`; None if there were none or several."""
        calls = self.calls.get(module, [])
        return calls[0] if len(calls) == 1 else None

    def save(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Forward hook of every module."""
        self.calls.setdefault(module, []).append(Call(args, kwargs, output))

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args: object, **kw: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Models add it to arange(T)."""
        positions = torch.tensor(POSITIONS, device=self.device)
        return positions - torch.arange(len(POSITIONS), device=self.device)


def record_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Stand-in of AttentionInterface: notes, and random values [1, T, Hq, width of value]."""
    records = module.vexpert_records
    assert isinstance(records, Records)
    shape = (1, query.shape[2], query.shape[1], value.shape[-1])
    generator = torch.Generator().manual_seed(len(records.attention))
    output = torch.randn(shape, generator=generator).to(query.device, query.dtype)
    records.attention[module] = AttentionInputs(query, key, value, options, output)
    return output, None


@torch.inference_mode()
def record(model: Any, attention: list[nn.Module], cache_name: str, vocab: int) -> Records:
    """Records of one pass of `model`, whose attention implementation must be `NAME`."""
    device = next(model.parameters()).device
    records = Records(device)
    hooks = [
        module.register_forward_hook(records.save, with_kwargs=True) for module in model.modules()
    ]
    for module in attention:
        module.__dict__["vexpert_records"] = records
    positions = torch.tensor(POSITIONS, device=device)
    inputs = {
        "input_ids": (7 * positions + 3)[None] % vocab,
        "position_ids": positions[None],
        "use_cache": False,
        cache_name: records,
    }
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for module in attention:
            del module.__dict__["vexpert_records"]
    return records


def agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether a result recomputed in another order of sums is the same; what is not finite fails.

    Tolerances: a few roundings of float32, one in each place of the shorter types.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}[want.dtype]
    error = (got.double() - want.double()).norm()
    return bool(error <= limit * want.double().norm())
