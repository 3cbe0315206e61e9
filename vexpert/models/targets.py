"""Which modules of a model adapters may change, and the LoRA sites of each."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import nn
from transformers import PreTrainedModel

from vexpert.lora.types import EmbeddingTarget, ExpertsTarget, LinearTarget, Target, TargetMap
from vexpert.models.experts import ExpertsLayer
from vexpert.models.probe import LOGITS, TOKENS, Probe
from vexpert.ops.types import LoraSite, OutputSlice


@dataclass
class _Sites:
    """Hands out sites in order."""

    max_rank: int
    made: list[LoraSite] = field(default_factory=list)

    def add(
        self,
        name: str,
        experts: int,
        inputs: int,
        outputs: int,
        slices: tuple[OutputSlice, ...] = (),
    ) -> LoraSite:
        slices = slices or (OutputSlice(0, outputs),)
        rank = len(slices) * self.max_rank
        site = LoraSite(len(self.made), name, experts, inputs, outputs, slices, rank)
        self.made.append(site)
        return site


def build_targets(
    model: nn.Module,
    probe: Probe,
    experts: dict[str, ExpertsLayer],
    model_type: str,
    max_rank: int,
) -> TargetMap:
    """Every Linear that sees the step's rows, every router, embedding and experts module."""
    sites = _Sites(max_rank)
    targets: dict[str, Target] = {}
    for path, module in model.named_modules():
        if path in experts:
            targets[path] = _experts_target(path, module, experts[path], sites)
        elif _is_linear(path, module, probe) or is_router(path, module, experts):
            targets[path] = _linear_target(path, module.weight, sites)
        elif type(module) is nn.Embedding and module.max_norm is None:
            targets[path] = _embedding_target(path, module, sites)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return TargetMap(
        model_type,
        type(model).__name__,
        targets,
        tuple(sites.made),
        shapes,
        _input_embedding(model),
        tied_modules(model),
    )


def _input_embedding(model: nn.Module) -> str:
    """Its path; the usual name for a module that is less than a model."""
    if not isinstance(model, PreTrainedModel):
        return "embed_tokens"
    table = model.get_input_embeddings()
    paths: Iterator[str] = (path for path, module in model.named_modules() if module is table)
    return next(paths)


def tied_modules(model: nn.Module) -> frozenset[str]:
    """Paths of modules that share the input embedding's weight."""
    if not isinstance(model, PreTrainedModel):
        return frozenset()
    table = model.get_input_embeddings()
    return frozenset(
        path
        for path, module in model.named_modules()
        if module is not table and getattr(module, "weight", None) is table.weight
    )


def _is_linear(path: str, module: nn.Module, probe: Probe) -> bool:
    """A Linear whose inputs had one row per token, or per logit for the last one."""
    return type(module) is nn.Linear and probe.rows.get(path) in ({TOKENS}, {LOGITS})


def is_router(path: str, module: nn.Module, experts: dict[str, ExpertsLayer]) -> bool:
    """Whether `module`, beside an experts module, holds a bare weight [experts, hidden]."""
    weight = getattr(module, "weight", None)
    if type(module) is nn.Linear or not isinstance(weight, nn.Parameter):
        return False
    parent = path.rpartition(".")[0]
    shapes = {
        (layer.weights.num_experts, layer.weights.hidden_size)
        for name, layer in experts.items()
        if name.rpartition(".")[0] == parent
    }
    return tuple(weight.shape) in shapes


def _linear_target(path: str, weight: object, sites: _Sites) -> LinearTarget:
    assert isinstance(weight, nn.Parameter)
    outputs, inputs = weight.shape
    return LinearTarget(path, sites.add(path, 1, inputs, outputs), inputs, outputs)


def _embedding_target(path: str, module: nn.Embedding, sites: _Sites) -> EmbeddingTarget:
    count, width = module.num_embeddings, module.embedding_dim
    return EmbeddingTarget(path, sites.add(path, count, 1, width), count, width)


def _experts_target(
    path: str, module: nn.Module, layer: ExpertsLayer, sites: _Sites
) -> ExpertsTarget:
    w = layer.weights
    inner, slices = w.intermediate_size, gate_up_slices(layer)
    count = w.num_experts
    outputs = inner * len(slices)
    return ExpertsTarget(
        path=path,
        gate_up=sites.add(f"{path}.gate_up", count, w.hidden_size, outputs, slices),
        down=sites.add(f"{path}.down", count, inner, w.hidden_size),
        num_experts=count,
        hidden_size=w.hidden_size,
        intermediate_size=inner,
        has_gate=w.has_gate,
        is_transposed=w.is_transposed,
        is_interleaved=w.is_interleaved,
        class_name=type(module).__name__,
    )


def gate_up_slices(layer: ExpertsLayer) -> tuple[OutputSlice, ...]:
    """Columns of gate and of up in gate_up's output; of up alone without a gate."""
    inner = layer.weights.intermediate_size
    if not layer.weights.has_gate:
        return (OutputSlice(0, inner),)
    if layer.weights.is_interleaved:
        return OutputSlice(0, inner, 2), OutputSlice(1, inner, 2)
    return OutputSlice(0, inner), OutputSlice(inner, inner)
