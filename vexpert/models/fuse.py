"""Puts fused norms, attention, routers and layers into a loaded model, where they agree with it."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import AttentionInterface

from vexpert.errors import UnsupportedError
from vexpert.kernels.common import can_use_pdl
from vexpert.kernels.norm_router import Scratch
from vexpert.log import get_logger
from vexpert.lora.layers import LoraPackedLinear
from vexpert.models import fused_record
from vexpert.models.attention import StepContext
from vexpert.models.experts import ExpertsLayer
from vexpert.models.fused_attention import PROJECTIONS, FusedAttention, recognise_attention
from vexpert.models.fused_embedding import FusedEmbedding, recognise_embedding
from vexpert.models.fused_layer import FusedLayer, recognise_layer
from vexpert.models.fused_norm import FusedNorm, recognise_norm
from vexpert.models.fused_record import Records, record
from vexpert.models.fused_rotary import FusedRotary, recognise_rotary
from vexpert.models.fused_router import FusedRouter, recognise_router
from vexpert.models.probe import Probe
from vexpert.models.replayed_layer import LayerReplays
from vexpert.models.support import longest_context
from vexpert.models.targets import is_router
from vexpert.ops.backend import LoraBackend

logger = get_logger(__name__)

AttentionInterface.register(fused_record.NAME, fused_record.record_attention)


class Fusions:
    """What was fused in one model. Forwards are replaced; modules, names and weights stay."""

    def __init__(self, pdl: bool) -> None:
        self.pdl = pdl
        self.norms: dict[nn.Module, FusedNorm] = {}
        self.attentions: dict[nn.Module, FusedAttention] = {}
        self.rotaries: dict[nn.Module, FusedRotary] = {}
        self.routers: dict[nn.Module, FusedRouter] = {}
        self.layers: dict[nn.Module, FusedLayer] = {}
        self.embedding: tuple[str, FusedEmbedding] | None = None  # and its path
        self.kept: Counter[str] = Counter()
        self.unfused_norms: list[nn.Module] = []

    def keep(self, module: nn.Module, reason: str) -> None:
        """Note that `module` runs as it was."""
        self.kept[f"{type(module).__name__}: {reason}"] += 1

    def install(self) -> None:
        """Replace the forwards."""
        parts: tuple[dict[nn.Module, Any], ...] = (
            self.norms,
            self.attentions,
            self.rotaries,
            self.routers,
            self.layers,
        )
        for fused in parts:
            for module, forward in fused.items():
                module.forward = forward

    def pack(self, model: nn.Module, backend: LoraBackend, context: StepContext) -> None:
        """Make q, k and v one product each, o the backend's, and fuse the embedding.

        Comes after LoRA-aware modules took their places in `model`.
        """
        if self.embedding is not None:
            path, embedding = self.embedding
            embedding.install(model.get_submodule(path), context)
        for module, fused in self.attentions.items():
            linears = [getattr(module, name) for name in PROJECTIONS]
            try:
                fused.packed = LoraPackedLinear(linears, backend)
                fused.project = fused.packed.deferred_parts
            except UnsupportedError as error:
                self.keep(module, f"q, k and v are three products, {error}")
            if type(module.o_proj) is nn.Linear:  # with LoRA it asks the backend itself
                fused.output = LoraPackedLinear([module.o_proj], backend)

    def report(self) -> None:
        """Log what was fused, and once for each class what was not and why."""
        logger.info(
            "fused: %d norms, %d attention modules, %d routers, %d decoder layers",
            *(len(self.norms), len(self.attentions), len(self.routers), len(self.layers)),
        )
        if self.embedding is not None:
            logger.info("fused: the embedding with the norm of it")
        for reason, count in self.kept.items():
            logger.info("not fused: %d of %s", count, reason)


def fuse(
    model: Any,
    seen: Probe,
    cache_name: str,
    experts: dict[str, ExpertsLayer],
) -> Fusions:
    """Fuse what is recognised in `model`, in place; its experts must have their runners.

    Comes before LoRA-aware modules are put in. The attention implementation is set anew after it.
    """
    fusions = Fusions(can_use_pdl(next(model.parameters()).device))
    modules = [call.module for call in seen.calls]
    model.set_attn_implementation(fused_record.NAME)
    records = record(model, modules, cache_name, seen.vocab_size)
    _fuse_norms(model, fusions)
    _fuse_attention(modules, records, fusions)
    _fuse_rotaries(model, records, fusions)
    _fuse_routers(model, experts, records, fusions)
    of_module = {model.get_submodule(path): layer for path, layer in experts.items()}
    _fuse_layers(model, modules, records, of_module, fusions)
    _fuse_embedding(model, records, fusions)
    fusions.install()
    return fusions


def _fuse_norms(model: nn.Module, fusions: Fusions) -> None:
    likely = {"": "rounded"}
    for module in model.modules():
        kind = type(module).__name__
        norm = recognise_norm(module, likely.get(kind, likely[""]))
        if norm is not None:
            assert norm.weight is not None
            likely[kind] = norm.form
            fused = FusedNorm(norm, norm.weight.dtype, module.forward, fusions.pdl)
            fusions.norms[module] = fused
        elif kind.endswith("Norm"):
            fusions.keep(module, "another kind of norm")
            fusions.unfused_norms.append(module)


def _fuse_attention(modules: Iterable[nn.Module], records: Records, fusions: Fusions) -> None:
    norms = {module: fused.norm for module, fused in fusions.norms.items()}
    likely = None
    for module in modules:
        found = recognise_attention(module, records, norms, fusions.pdl, likely)
        if isinstance(found, str):
            fusions.keep(module, found)
        else:
            fusions.attentions[module] = found
            likely = found.rope


def _fuse_rotaries(model: Any, records: Records, fusions: Fusions) -> None:
    longest = longest_context(model.config)
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            found = recognise_rotary(module, records, longest)
            if isinstance(found, str):
                fusions.keep(module, found)
            else:
                fusions.rotaries[module] = found


def _fuse_embedding(model: Any, records: Records, fusions: Fusions) -> None:
    module = model.get_input_embeddings()
    known = fusions.norms, fusions.rotaries
    found = recognise_embedding(module, records, *known, fusions.pdl)
    if isinstance(found, str):
        fusions.keep(module, found)
        return
    path = next(path for path, each in model.named_modules() if each is module)
    fusions.embedding = path, found


def _fuse_routers(
    model: nn.Module, experts: dict[str, ExpertsLayer], records: Records, fusions: Fusions
) -> None:
    likely = None
    for path, module in model.named_modules():
        if not is_router(path, module, experts):
            continue
        found = recognise_router(module, records, fusions.pdl, likely)
        if isinstance(found, str):
            fusions.keep(module, found)
        else:
            fusions.routers[module] = found
            likely = found.choice


def _fuse_layers(
    model: nn.Module,
    attentions: Iterable[nn.Module],
    records: Records,
    experts: dict[nn.Module, ExpertsLayer],
    fusions: Fusions,
) -> None:
    wanted = set(attentions)
    scratch, replays = _scratch(fusions.routers), LayerReplays()
    for layer in model.modules():
        inside = [child for child in layer.children() if child in wanted]
        if len(inside) != 1:
            continue
        known = fusions.norms, experts, fusions.routers
        found = recognise_layer(layer, inside[0], records, *known)
        if isinstance(found, str):
            fusions.keep(layer, found)
        else:
            fusions.layers[layer] = FusedLayer(found, scratch, fusions.pdl, replays)


def _scratch(routers: dict[nn.Module, FusedRouter]) -> Scratch | None:
    """What routers share, as large as the largest needs it; None without routers."""
    if not routers:
        return None
    weights = [module.get_parameter("weight") for module in routers]
    return Scratch.empty(max(weight.shape[0] for weight in weights), weights[0].device)
