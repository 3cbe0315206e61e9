"""One small forward pass that observes how a model uses attention, cache, experts and Linear.

Nothing is computed by attention or experts: their stand-ins return zeros and take notes. What a
model does differently from what the paged attention assumes is found here, at load, and refused.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vexpert.errors import ModelError
from vexpert.kernels.dense_factors import HeadColumns
from vexpert.models.latent import find_columns
from vexpert.models.masks import CAUSAL, MaskKind, UnknownMask, identify
from vexpert.ops.float32_linear import head_dtype

NAME = "vexpert-probe"
TOKENS = 5  # of the observed pass; logits are wanted of LOGITS of them
LOGITS = 2


@dataclass
class AttentionCall:
    """What one attention module was given."""

    path: str
    module: nn.Module
    kind: MaskKind
    key_shape: tuple[int, int]  # heads and width of what goes into the cache
    value_shape: tuple[int, int]
    latent: HeadColumns | None  # what expands what it caches; None: it is no latent attention


@dataclass
class Probe:
    """Notes of the observed pass; stands in for the cache as well."""

    paths: dict[nn.Module, str]
    calls: list[AttentionCall] = field(default_factory=list)
    rows: dict[str, set[int]] = field(default_factory=dict)  # of each Linear's inputs, by path
    vocab_size: int = 0
    logits_dtype: torch.dtype = torch.float32
    is_compileable: bool = False
    # Keys, values [1, Hkv, T, width] in the model's dtype that the cache got last.
    _updated: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._updated = (key, value)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return query_length, 0

    def attend(
        self,
        module: nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: object,
        options: dict[str, object],
    ) -> None:
        """Note a call of attention, or raise ModelError where its inputs are not understood."""
        path = self.paths[module]
        if not isinstance(mask, MaskKind):
            name = mask.name if isinstance(mask, UnknownMask) else type(mask).__name__
            raise ModelError(f"{path}: its attention mask ({name}) is not causal, window or chunk")
        window = options.get("sliding_window")
        if isinstance(window, int) and mask == CAUSAL:
            mask = MaskKind(window=window)
        if self._updated is None:
            raise ModelError(f"{path}: its keys do not go through a cache of its own")
        cached, latent = self._updated, None
        if key is not cached[0] or value is not cached[1]:
            latent = find_columns(path, module, cached, (key, value))
            if options.get("softcap") is not None or options.get("s_aux") is not None:
                raise ModelError(f"{path}: its latent attention caps scores, or has sinks")
        shapes = [(t.shape[1], t.shape[3]) for t in cached]
        self.calls.append(AttentionCall(path, module, mask, shapes[0], shapes[1], latent))
        self._updated = None

    def saw_linear(self, module: nn.Linear, args: tuple[torch.Tensor, ...]) -> None:
        """Forward pre-hook of every Linear."""
        path = self.paths[module]
        self.rows.setdefault(path, set()).add(args[0].numel() // module.in_features)


def probe_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Stand-in of AttentionInterface: notes, and zeros [1, T, Hq, d of value]."""
    probe = module.vexpert_probe
    assert isinstance(probe, Probe)
    probe.attend(module, key, value, attention_mask, options)
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def probe_mask(
    *args: object,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    attention_mask: object = None,
    device: torch.device | None = None,
    **kwargs: object,
) -> MaskKind | UnknownMask:
    """Stand-in of AttentionMaskInterface: the kind of mask instead of the mask."""
    return identify(mask_function, local_size, device)


def _as_served(head: nn.Module, args: object, logits: torch.Tensor) -> torch.Tensor:
    """Forward hook of lm_head: its outputs in the dtype of `models.swap`'s modules."""
    return logits.to(head_dtype(head.get_parameter("weight")))


@contextmanager
def _attached(model: Any, probe: Probe) -> Iterator[None]:
    """`probe` on all modules, and a hook on every Linear, for the time of the pass.

    lm_head gives the dtype that it will once it is swapped: the model may cast it further.
    """
    hooks = []
    head = model.get_output_embeddings()
    if type(head) is nn.Linear:
        hooks.append(head.register_forward_hook(_as_served))
    for module in probe.paths:
        module.__dict__["vexpert_probe"] = probe
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(probe.saw_linear))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module in probe.paths:
            del module.__dict__["vexpert_probe"]


def _run(model: Any, probe: Probe, inputs: dict[str, Any]) -> torch.Tensor:
    """The observed pass; ModelError if the model asks a stand-in for what it does not have."""
    try:
        with _attached(model, probe), torch.inference_mode():
            logits: torch.Tensor = model(**inputs).logits
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ModelError(
            f"{type(model).__name__} needs more than attention over a KV cache: {error}"
        ) from error
    return logits


def observe(model: Any, cache_name: str, num_layers: int) -> Probe:
    """Run `model` (with this probe's attention set) over a few tokens; its notes.

    Raises ModelError where fewer than `num_layers` attention modules were reached, or where one
    does what cannot be served.
    """
    probe = Probe({module: path for path, module in model.named_modules()})
    device = next(model.parameters()).device
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=device)
    inputs = {
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS, device=device)[None],
        "logits_to_keep": torch.arange(TOKENS - LOGITS, TOKENS, device=device),
        "use_cache": False,
        cache_name: probe,
    }
    logits = _run(model, probe, inputs)
    if tuple(logits.shape[:2]) != (1, LOGITS):
        raise ModelError(f"{type(model).__name__} does not give logits of chosen rows")
    modules = [call.module for call in probe.calls]
    if len(set(modules)) < len(modules):
        raise ModelError(f"{type(model).__name__} runs a layer more than once in one pass")
    if len(modules) < num_layers:
        raise ModelError(
            f"{type(model).__name__}: {len(modules)} of its {num_layers} layers run attention "
            "through AttentionInterface; others keep a state that is not a KV cache"
        )
    probe.vocab_size, probe.logits_dtype = logits.shape[-1], logits.dtype
    return probe
