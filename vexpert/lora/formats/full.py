"""Full parameters in an adapter file: modules_to_save, biases, and repeated base weights.

`<module>.weight` (PEFT's plain name), `<module>.modules_to_save.weight` (the same again) replace a
parameter. `<module>.base_layer.weight` repeats the base weight under a pair of factors: PEFT loads
it into the base model, so it must equal the base or counts as a replacement.
`<module>.original_module.weight` is the copy that modules_to_save took the place of: never used.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from vexpert.errors import AdapterError
from vexpert.lora.checks import require_finite, same_values
from vexpert.lora.formats.context import Context, shapes
from vexpert.lora.key_lists import counted
from vexpert.lora.keys import Piece
from vexpert.lora.types import EmbeddingTarget, ExpertsTarget, LinearTarget, TargetMap

BaseWeight = Callable[[str], torch.Tensor | None]  # by parameter name; None: unknown


@dataclass
class FullParameters:
    """Replacements by parameter name, and which extras they need."""

    # Each [the parameter's shape], in the file's dtype.
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    extras: set[str] = field(default_factory=set)
    examples: list[tuple[str, str]] = field(default_factory=list)  # (extra, key)
    names: set[str] = field(default_factory=set)  # all in the file, equal to the base's or not


def read_full(
    placed: Iterable[tuple[str, Piece]],
    targets: TargetMap,
    base_weight: BaseWeight | None,
    context: Context,
) -> FullParameters:
    """Replacements from (module path, piece); what equals the base weight is left out."""
    result = FullParameters()
    copies: list[str] = []
    for path, piece in placed:
        result.names.add(f"{path}.{piece.param}")
        if piece.holder == "original_module":
            continue
        name = f"{path}.{piece.param}"
        require_finite(piece.key, piece.tensor)
        _check_shape(name, piece, targets)
        if name in result.values:
            if not torch.equal(result.values[name], piece.tensor):
                raise AdapterError(f"{piece.key}: the file holds another value of {name}")
            continue
        if _is_base(name, piece, base_weight, copies):
            continue
        result.values[name] = piece.tensor.clone()
        kinds = _kinds(path, piece, targets)
        result.extras |= kinds
        result.examples += [(kind, piece.key) for kind in kinds]
        context.note_format("full parameters")
    if copies:
        context.warnings.append(
            f"{counted(len(copies), 'copy', 'copies')} of base weights taken as unchanged, not "
            f"compared, first {copies[0]}"
        )
    return result


def parameter_shape(name: str, targets: TargetMap) -> tuple[int, ...] | None:
    """Shape of the model's parameter; None when the model is not known to have it."""
    if name in targets.parameters:
        return targets.parameters[name]
    path, _, param = name.rpartition(".")
    target = targets.targets.get(path)
    if isinstance(target, LinearTarget):
        if param == "bias" and not targets.parameters:
            return (target.out_features,)
        return (target.out_features, target.in_features) if param == "weight" else None
    if isinstance(target, EmbeddingTarget) and param == "weight":
        return target.num_embeddings, target.embedding_dim
    return None


def _check_shape(name: str, piece: Piece, targets: TargetMap) -> None:
    wanted = parameter_shape(name, targets)
    assert wanted is not None
    have = tuple(piece.tensor.shape)
    if have == wanted or _is_vocabulary(name, piece, targets):
        return
    raise AdapterError(
        f"{shapes(piece)}: the model's {name} is {list(wanted)}; the adapter was made for another "
        "base model"
    )


def _is_vocabulary(name: str, piece: Piece, targets: TargetMap) -> bool:
    """A whole embedding or lm_head with another number of rows."""
    wanted = parameter_shape(name, targets)
    path = name.rpartition(".")[0]
    is_table = isinstance(targets.targets.get(path), EmbeddingTarget) or _is_head(path)
    return is_table and wanted is not None and tuple(piece.tensor.shape[1:]) == wanted[1:]


def _is_head(path: str) -> bool:
    return path.rpartition(".")[2] == "lm_head"


def _is_base(name: str, piece: Piece, base_weight: BaseWeight | None, copies: list[str]) -> bool:
    base = base_weight(name) if base_weight is not None else None
    if base is not None:
        return same_values(base, piece.tensor)
    if piece.holder != "base_layer" or piece.param != "weight":
        return False
    copies.append(piece.key)
    return True


def _kinds(path: str, piece: Piece, targets: TargetMap) -> set[str]:
    target = targets.targets.get(path)
    name = f"{path}.{piece.param}"
    kinds = set()
    if tuple(piece.tensor.shape) != parameter_shape(name, targets):
        kinds.add("vocabulary")
    if piece.param.endswith("bias"):
        kinds.add("full_bias")
    elif isinstance(target, EmbeddingTarget):
        kinds.add("full_embedding")
    elif _is_head(path):
        kinds.add("full_lm_head")
    elif isinstance(target, LinearTarget):
        kinds.add("full_router" if is_router(path, targets) else "full_linear")
    else:
        kinds.add("full_other")
    return kinds


def is_router(path: str, targets: TargetMap) -> bool:
    """A Linear beside an experts module, with one output per expert."""
    parent, _, leaf = path.rpartition(".")
    experts, router = targets.targets.get(f"{parent}.experts"), targets.targets[path]
    return (
        leaf in ("gate", "router")
        and isinstance(experts, ExpertsTarget)
        and isinstance(router, LinearTarget)
        and router.out_features == experts.num_experts
    )
