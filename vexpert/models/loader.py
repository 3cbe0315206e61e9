"""Loads a model and swaps in our attention, experts and LoRA-aware layers."""

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from transformers import AttentionInterface
from transformers.integrations.moe import ExpertsInterface
from transformers.masking_utils import AttentionMaskInterface

from vexpert.config import EngineConfig
from vexpert.errors import ModelError
from vexpert.log import get_logger
from vexpert.lora.types import LoraState, TargetMap
from vexpert.models import attention, experts, probe
from vexpert.models.attention import AttentionLayer, StepContext
from vexpert.models.cache import StepCache
from vexpert.models.checkpoint import (
    build_model,
    choose_device,
    choose_dtype,
    eos_token_ids,
    read_config,
)
from vexpert.models.latent import keep_latents
from vexpert.models.probe import Probe
from vexpert.models.served import TransformersModel
from vexpert.models.source import model_source
from vexpert.models.support import check_supported, longest_context
from vexpert.models.swap import attach_runners, swap_head, swap_layers
from vexpert.models.targets import build_targets
from vexpert.models.tokenizer import read_tokenizer
from vexpert.models.types import ModelInfo, ServedModel
from vexpert.ops.backend import LoraBackend, select_backend

if TYPE_CHECKING:
    from vexpert.models.fuse import Fusions

logger = get_logger(__name__)

AttentionInterface.register(attention.NAME, attention.paged_attention)
AttentionInterface.register(probe.NAME, probe.probe_attention)
AttentionMaskInterface.register(probe.NAME, probe.probe_mask)
ExpertsInterface.register(experts.NAME, experts.experts_forward)


def load_tokenizer(config: EngineConfig) -> Any:
    """The tokenizer that `config` names, or the model's own; ModelError if there is none."""
    return read_tokenizer(config)


def load_model(config: EngineConfig) -> ServedModel:
    """The model of `config`, ready for `allocate_cache` and `forward`.

    Raises ModelError, with the reason, for a model that cannot be loaded or served exactly.
    """
    model_config = read_config(config)
    check_supported(model_config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, model_config)
    model = build_model(config, model_config, dtype, device)
    return serve(model, model_config, config, dtype, device)


def serve(
    model: Any, model_config: Any, config: EngineConfig, dtype: torch.dtype, device: torch.device
) -> TransformersModel:
    """Swap our pieces into `model`, in place; ModelError where it does what they cannot."""
    text = model_config.get_text_config()
    cache_name = _cache_name(model)
    experts_layers = experts.attach_experts(model)
    seen = _observe(model, cache_name, text.num_hidden_layers, experts_layers)
    targets = build_targets(model, seen, experts_layers, text.model_type, config.max_lora_rank)
    lora = LoraState()
    options = config.kernel_plans, config.batch_invariant
    backend = select_backend(config.lora_backend, device, dtype, *options)
    attach_runners(experts_layers, backend)
    if backend.name == "numba":
        _compile_norms(model)
    fusions = _fuse(model, seen, cache_name, experts_layers) if backend.name == "triton" else None
    if config.enable_lora:
        swap_layers(model, targets, experts_layers, lora, backend)
    else:
        targets = TargetMap(text.model_type, type(model).__name__, {}, ())
    swap_head(model)
    context = StepContext()
    if fusions is not None:
        fusions.pack(model, backend, context)
        fusions.report()
        if config.batch_invariant:
            _make_invariant(seen, fusions, experts_layers)
    use_kernels = backend.name == "triton"
    layers = _attach_attention(seen, context, use_kernels, config.batch_invariant)
    return TransformersModel(
        info=_info(model, model_config, config, seen, layers, dtype, device),
        targets=targets,
        lora=lora,
        model=model,
        layers=layers,
        context=context,
        cache=StepCache(context),
        cache_name=cache_name,
        products=_products(config, backend),
    )


def _make_invariant(
    seen: Probe, fusions: "Fusions", layers: dict[str, experts.ExpertsLayer]
) -> None:
    from vexpert.models.invariant import make_invariant  # needs triton

    make_invariant(seen, fusions, layers)


def _products(config: EngineConfig, backend: LoraBackend) -> AbstractContextManager[object]:
    """What the forward runs in: products of its own, or PyTorch's."""
    if not config.batch_invariant:
        return nullcontext()
    from vexpert.models.invariant import InvariantProducts  # needs triton

    return InvariantProducts(backend)


def _fuse(
    model: Any, seen: Probe, cache_name: str, layers: dict[str, experts.ExpertsLayer]
) -> "Fusions":
    """Fuse what can be; the model is set to our attention again."""
    from vexpert.models.fuse import fuse  # needs triton

    fusions = fuse(model, seen, cache_name, layers)
    model.set_attn_implementation(attention.NAME)
    return fusions


def _compile_norms(model: Any) -> None:
    from vexpert.models.norms import compile_norms  # needs numba

    logger.info("%d RMS norms run as one compiled call each", compile_norms(model))


def find_targets(model: Any, text: Any, max_rank: int) -> TargetMap:
    """Targets of `model`, which may lie on the meta device; the model is of no use afterwards."""
    layers = experts.attach_experts(model)
    seen = _observe(model, _cache_name(model), text.num_hidden_layers, layers)
    return build_targets(model, seen, layers, text.model_type, max_rank)


def _cache_name(model: Any) -> str:
    """`cache`, or `past_key_values` in older versions of transformers."""
    known = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in known:
            return name
    raise ModelError(f"{type(model).__name__} takes no cache of keys and values")


def _observe(
    model: Any, cache_name: str, num_layers: int, layers: dict[str, experts.ExpertsLayer]
) -> Probe:
    """Notes of one pass; then the model is set to our attention."""
    if layers:
        model.set_experts_implementation(experts.NAME)
    model.set_attn_implementation(probe.NAME)
    seen = probe.observe(model, cache_name, num_layers)
    model.set_attn_implementation(attention.NAME)
    idle = [path for path, layer in layers.items() if layer.calls == 0]
    if idle:
        raise ModelError(f"{idle[0]}: its experts do not run through ExpertsInterface")
    return seen


def _attach_attention(
    seen: Probe, context: StepContext, use_kernels: bool, batch_invariant: bool
) -> list[AttentionLayer]:
    """Put an AttentionLayer on each attention module, in the order they run."""
    layers = []
    for call in seen.calls:
        shapes = call.key_shape, call.value_shape
        latent = None if call.latent is None else keep_latents(call.module, call.latent)
        layer = AttentionLayer(context, call.kind, *shapes, latent, use_kernels, batch_invariant)
        # PyTorch types a module's attributes as tensors and modules.
        call.module.vexpert_layer = layer  # type: ignore[assignment]
        layers.append(layer)
    return layers


def _info(
    model: Any,
    model_config: Any,
    config: EngineConfig,
    seen: Probe,
    layers: list[AttentionLayer],
    dtype: torch.dtype,
    device: torch.device,
) -> ModelInfo:
    elements = sum(layer.elements_per_token for layer in layers)
    return ModelInfo(
        name=model_source(config),
        model_type=model_config.get_text_config().model_type,
        vocab_size=seen.vocab_size,
        max_model_len=longest_context(model_config),
        eos_token_ids=eos_token_ids(config, model_config),
        dtype=dtype,
        device=device,
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        cache_bytes_per_token=elements * dtype.itemsize,
        logits_dtype=seen.logits_dtype,
    )
