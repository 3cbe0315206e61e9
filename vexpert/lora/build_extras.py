"""From an adapter's extras and the base weights to what each site must do.

DoRA: row o of the merged weight is `magnitude[o]` long, so with n[o] = ||(W + s B A)[o]||,

    y = gain * (W x + s B A x) + b,  gain = magnitude / n

and as a layer has W x + s B A x + b at hand: y = gain * that + (1 - gain) * b.
"""

import torch

from vexpert.errors import AdapterError
from vexpert.lora.formats.full import BaseWeight, is_router
from vexpert.lora.site_extras import SiteExtra, SiteExtras
from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsMagnitude,
    ExpertsTarget,
    Factors,
    LinearTarget,
    TargetMap,
    TokenRows,
)
from vexpert.ops.types import LoraSite

# Kinds of extras that the layers can apply; the reader refuses an adapter with any other.
SUPPORTED = frozenset(
    {
        "bias",
        "dora",
        "expert_dora",
        "full_lm_head",
        "full_embedding",
        "full_router",
        "full_linear",
        "full_bias",
        "tokens",
    }
)


def build_extras(
    weights: AdapterWeights, targets: TargetMap, base_weight: BaseWeight
) -> SiteExtras:
    """Extras of every site that has any, on the host.

    `base_weight`: parameters of the model by name. AdapterError where one cannot be applied.
    """
    if not weights.extras:
        return {}
    builder = _Builder(weights, targets, base_weight)
    with torch.no_grad():
        builder.build()
    return {site: SiteExtra(**tensors) for site, tensors in builder.found.items()}


def extras_like(weights: AdapterWeights, targets: TargetMap) -> SiteExtras:
    """Tensors of the shapes that `build_extras` gives, with no meaningful values.

    For a model whose weights are not there: biases of the base count as present, tied heads as
    not tied.
    """

    def stand_in(name: str) -> torch.Tensor | None:
        shape = targets.parameters.get(name)
        return None if shape is None else torch.ones(1).expand(shape)

    return build_extras(weights, targets, stand_in)


class _Builder:
    def __init__(self, weights: AdapterWeights, targets: TargetMap, base: BaseWeight) -> None:
        self.weights = weights
        self.targets = targets
        self.base = base
        self.found: dict[int, dict[str, torch.Tensor]] = {}  # by site, by field of SiteExtra

    def build(self) -> None:
        for path, magnitude in self.weights.magnitude.items():
            self._linear_dora(path, magnitude)
        for path, magnitudes in self.weights.expert_magnitude.items():
            self._experts_dora(path, magnitudes)
        for path, bias in self.weights.bias.items():
            self._shift(self._linear(path).site, bias[None])
        for name, value in self.weights.full.items():
            self._full(name, value)
        for path, rows in self.weights.tokens.items():
            self._tokens(path, rows)

    def _set(self, site: LoraSite, name: str, value: torch.Tensor) -> None:
        fields = self.found.setdefault(site.index, {})
        assert name not in fields, (site.name, name)
        fields[name] = value

    def _shift(self, site: LoraSite, value: torch.Tensor) -> None:
        """Add `value` [E or 1, out] to the site's shift."""
        fields = self.found.setdefault(site.index, {})
        value = value.to("cpu", torch.float32)
        fields["shift"] = fields["shift"] + value if "shift" in fields else value

    def _linear(self, path: str) -> LinearTarget:
        target = self.targets.targets[path]
        assert isinstance(target, LinearTarget), path
        return target

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.base(name)
        assert weight is not None, f"the model has no parameter {name}"
        return weight

    def _linear_dora(self, path: str, magnitude: torch.Tensor) -> None:
        factors = self.weights.modules[path]
        assert isinstance(factors, Factors), path
        norm = _norms(self._weight(f"{path}.weight"), factors, 0)
        gain = _gain(path, magnitude, norm)[None]
        self._gain(self._linear(path).site, gain, self.base(f"{path}.bias"))

    def _gain(self, site: LoraSite, gain: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Set the gain [E or 1, out], and keep it off the base's bias [E, out] or [out]."""
        self._set(site, "gain", gain)
        if bias is not None:
            self._shift(site, (1.0 - gain) * bias.to("cpu", torch.float32))

    def _experts_dora(self, path: str, magnitudes: ExpertsMagnitude) -> None:
        target, factors = self.targets.targets[path], self.weights.modules[path]
        assert isinstance(target, ExpertsTarget), path
        assert isinstance(factors, ExpertsFactors), path
        up = [(magnitudes.up, factors.up)]
        gate_up = [(magnitudes.gate, factors.gate), *up] if target.has_gate else up
        for site, parts, name in (
            (target.gate_up, gate_up, first_parameter(target)),
            (target.down, [(magnitudes.down, factors.down)], "down_proj"),
        ):
            if any(magnitude is not None for magnitude, _ in parts):
                weight = self._weight(f"{path}.{name}")
                weight = weight.mT if target.is_transposed else weight
                gain = _experts_gain(site, parts, weight)
                self._gain(site, gain, self.base(f"{path}.{name}_bias"))

    def _full(self, name: str, value: torch.Tensor) -> None:
        path, _, param = name.rpartition(".")
        target = self.targets.targets.get(path)
        if param == "weight" and isinstance(target, LinearTarget | EmbeddingTarget):
            self._set(target.site, "weight", value)
        elif isinstance(target, LinearTarget) and param == "bias" and self._adds_bias(path):
            self._shift(target.site, self._change(name, value)[None])
        elif isinstance(target, ExpertsTarget) and param == f"{first_parameter(target)}_bias":
            self._shift(target.gate_up, self._change(name, value))
        elif isinstance(target, ExpertsTarget) and param == "down_proj_bias":
            self._shift(target.down, self._change(name, value))
        else:
            raise AdapterError(
                f"the adapter replaces {name}, which cannot be done for one adapter alone; merge "
                "it into the base model, or train without it"
            )

    def _adds_bias(self, path: str) -> bool:
        """A router may use its bias otherwise than a Linear does."""
        return not is_router(path, self.targets)

    def _change(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return value.to("cpu", torch.float32) - self._weight(name).to("cpu", torch.float32)

    def _tokens(self, path: str, rows: TokenRows) -> None:
        ids, order = torch.tensor(rows.indices, dtype=torch.int64).sort()
        if bool((ids[1:] == ids[:-1]).any()):
            raise AdapterError(
                f"{path}: trainable_token_indices names a token twice; save the adapter again"
            )
        for owner in [path, *self._tied_to(path)]:
            target = self.targets.targets.get(owner)
            if owner in self.weights.modules or not isinstance(
                target, LinearTarget | EmbeddingTarget
            ):
                raise AdapterError(
                    f"{owner}: trained token rows together with factors cannot be applied; merge "
                    "the adapter into the base model"
                )
            self._set(target.site, "token_ids", ids)
            self._set(target.site, "token_rows", rows.rows[order])

    def _tied_to(self, path: str) -> list[str]:
        """An output head with the very weight of the embedding `path`: it shares trained rows."""
        table = self._weight(f"{path}.weight")
        return [
            other
            for other, target in self.targets.targets.items()
            if other not in (path, *self.weights.tokens)
            and isinstance(target, LinearTarget)
            and _is_same(self.base(f"{other}.weight"), table)
        ]


def first_parameter(target: ExpertsTarget) -> str:
    """Name of the parameter behind the gate_up site."""
    return "gate_up_proj" if target.has_gate else "up_proj"


def _is_same(x: torch.Tensor | None, y: torch.Tensor) -> bool:
    return x is not None and x.shape == y.shape and x.data_ptr() == y.data_ptr()


def _norms(weight: torch.Tensor, factors: Factors, expert: int) -> torch.Tensor:
    """||row|| of weight [out, in] plus one expert's delta, [out] float32 on the host."""
    a, b = (x[expert if x.shape[0] > 1 else 0].to(weight.device) for x in (factors.a, factors.b))
    merged = torch.addmm(weight.float(), b.float(), a.float(), alpha=factors.scale)
    norms: torch.Tensor = torch.linalg.vector_norm(merged, dim=1)
    return norms.cpu()


def _gain(name: str, magnitude: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    gain = magnitude.float() / norm
    if not bool(torch.isfinite(gain).all()):
        raise AdapterError(
            f"{name}: a row of the weight with its delta is zero, so DoRA's direction is "
            "undefined; merge the adapter into the base model"
        )
    return gain


def _experts_gain(
    site: LoraSite,
    parts: list[tuple[torch.Tensor | None, Factors | None]],
    weight: torch.Tensor,
) -> torch.Tensor:
    """[E, out] in the order of the site's outputs; 1 where nothing is adapted. weight [E, out, in].

    `parts`: magnitude [E, size] and factors of each output slice.
    """
    gain = torch.ones(site.num_experts, site.out_features)
    for (magnitude, factors), output in zip(parts, site.slices, strict=True):
        if magnitude is None:
            continue
        assert factors is not None, site.name
        columns = slice(output.start, output.start + output.size * output.stride, output.stride)
        for expert in range(site.num_experts):
            if not bool(magnitude[expert, 0].isnan()):
                norm = _norms(weight[expert, columns], factors, expert)
                gain[expert, columns] = _gain(f"{site.name} {expert}", magnitude[expert], norm)
    return gain
