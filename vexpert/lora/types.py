"""LoRA's nouns: targets of a model, factors of an adapter, the batch's view."""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from vexpert.lora.info import AdapterInfo as AdapterInfo  # also read from here
from vexpert.lora.info import TierUsage as TierUsage
from vexpert.lora.site_extras import SiteExtra, SiteExtras
from vexpert.ops.types import LoraSite, SiteTable


@dataclass(frozen=True)
class LinearTarget:
    """A module y = W x + b that adapters may change: nn.Linear, a router's bare weight, lm_head."""

    path: str  # module path in the transformers model, e.g. "model.layers.0.mlp.gate"
    site: LoraSite
    in_features: int
    out_features: int


@dataclass(frozen=True)
class EmbeddingTarget:
    """An embedding: a site with num_experts = vocabulary, in_features 1, and B shared by all."""

    path: str
    site: LoraSite
    num_embeddings: int
    embedding_dim: int


@dataclass(frozen=True)
class ExpertsTarget:
    """The routed experts of one layer: sites gate_up (slices gate, up; or up alone) and down."""

    path: str  # e.g. "model.layers.0.mlp.experts"
    gate_up: LoraSite
    down: LoraSite
    num_experts: int
    hidden_size: int
    intermediate_size: int
    has_gate: bool
    is_transposed: bool  # the base parameters are [E, in, out]
    is_interleaved: bool  # the base gate_up's outputs alternate gate, up
    class_name: str  # e.g. "GptOssExperts": orientation of square weights depends on it


Target = LinearTarget | EmbeddingTarget | ExpertsTarget


@dataclass(frozen=True)
class TargetMap:
    """Every module of the model that an adapter may change, by module path."""

    model_type: str  # e.g. "qwen3_moe"
    architecture: str  # e.g. "Qwen3MoeForCausalLM"
    targets: dict[str, Target]
    sites: tuple[LoraSite, ...]  # sites[i].index == i
    # Shapes of all parameters and persistent buffers of the model by name: what full weights and
    # biases in a file are held to. Empty: only the weights of targets are known.
    parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    input_embedding: str = "embed_tokens"  # path of what turns token ids into the first states
    tied: frozenset[str] = frozenset()  # paths whose weight is the input embedding's own


@dataclass(frozen=True)
class Factors:
    """One LoRA pair in canonical form; delta weight of expert e = scale * b[e] @ a[e].

    Both in the file's dtype, or float32 where experts differ. A leading 1 means: shared by all
    experts (a dense Linear has both leading 1). For an embedding
    a is [1, r, V]. Gate and up of one adapter share A when their `a` is the same tensor object.
    """

    a: torch.Tensor  # [E or 1, r, in]
    b: torch.Tensor  # [E or 1, out, r], rows in the order gate / up (never interleaved)
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[1]


class PerExpertFactors(Factors):
    """The same where a file has one pair for each expert: not stacked before anybody asks.

    a_parts: E of [r, in]; b_parts: E of [out, r].
    """

    def __init__(
        self, a_parts: tuple[torch.Tensor, ...], b_parts: tuple[torch.Tensor, ...], scale: float
    ) -> None:
        fields = {"a_parts": a_parts, "b_parts": b_parts, "scale": scale}
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    a_parts: tuple[torch.Tensor, ...]
    b_parts: tuple[torch.Tensor, ...]

    @functools.cached_property
    def a(self) -> torch.Tensor:
        return torch.stack(self.a_parts)

    @functools.cached_property
    def b(self) -> torch.Tensor:
        return torch.stack(self.b_parts)

    @property
    def rank(self) -> int:
        return self.a_parts[0].shape[0]


@dataclass(frozen=True)
class ExpertsFactors:
    """Routed experts' factors; None: that projection is not adapted. Without a gate, only up."""

    gate: Factors | None = None
    up: Factors | None = None
    down: Factors | None = None


@dataclass(frozen=True)
class ExpertsMagnitude:
    """DoRA's magnitudes of routed experts, in the file's dtype; NaN: that expert is not adapted."""

    gate: torch.Tensor | None = None  # [E, I]
    up: torch.Tensor | None = None  # [E, I]
    down: torch.Tensor | None = None  # [E, H]


@dataclass(frozen=True)
class TokenRows:
    """Rows of an embedding or of lm_head that the adapter replaces."""

    indices: tuple[int, ...]
    rows: torch.Tensor  # [len(indices), dim] in the file's dtype


@dataclass(frozen=True)
class AdapterWeights:
    """A whole adapter in canonical form on the host, keyed by target path. Immutable.

    What goes beyond pairs of factors is an *extra*; `extras` names the kinds used, and a caller
    that cannot apply one must not use the adapter. Where none is told, a dtype is the file's.
    """

    modules: dict[str, Factors | ExpertsFactors]
    warnings: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()  # formats found in the file, e.g. "fused experts"
    extras: frozenset[str] = frozenset()  # members of vexpert.lora.extras.EXTRAS
    # DoRA: row o of the merged weight is magnitude[o] * unit vector of (W + delta W)[o]; [out]
    magnitude: dict[str, torch.Tensor] = field(default_factory=dict)
    expert_magnitude: dict[str, ExpertsMagnitude] = field(default_factory=dict)
    bias: dict[str, torch.Tensor] = field(default_factory=dict)  # [out] float32, added
    full: dict[str, torch.Tensor] = field(default_factory=dict)  # [the parameter's shape]
    tokens: dict[str, TokenRows] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterRef:
    """One version of a named adapter. Reloading a name makes a new version."""

    name: str
    version: int


class Wait(enum.Enum):
    """Why an adapter has no slot for a request now."""

    COMING = "coming"  # its weights are on their way: nobody has to make room
    NO_ROOM = "no room"  # running requests hold the slots, or the bytes


@dataclass(frozen=True)
class LoraSignature:
    """All that the host decides by when it launches a step's LoRA: bounds, never exact values.

    Steps with equal signatures launch the same kernels, so they may replay one captured graph.
    """

    ranks: tuple[int, ...]  # by site, no active adapter has more there; 0: none adapts it
    adapters: int  # no more are active

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.ranks, self.adapters))


@dataclass(frozen=True)
class BatchView:
    """Which adapter slot each row of this step uses."""

    slots: torch.Tensor  # [T] int64: slot of each token, -1: base
    logit_slots: torch.Tensor  # [n] int64: slot of each row that lm_head computes
    active_slots: tuple[int, ...]  # distinct slots >= 0 of this step, ascending, on the host
    use_virtual_experts: bool = True
    signature: LoraSignature | None = None  # None: layers look at the tables of `active_slots`

    @property
    def most_adapters(self) -> int:
        """No more adapters are active; the same for all steps of one signature."""
        return len(self.active_slots) if self.signature is None else self.signature.adapters


NO_EXTRAS: dict[int, list[tuple[int, SiteExtra]]] = {}


@dataclass
class LoraState:
    """What LoRA-aware layers of one model read: the tables of all sites and this step's view.

    `view` is None when no row of the step has an adapter: layers then run the base path alone.
    `tables` is None on a server without LoRA.
    """

    tables: tuple[SiteTable, ...] | None = None
    # Extras of the adapters on the device by slot; the pool's own, updated in place.
    installed: Mapping[int, SiteExtras] = field(default_factory=dict)
    view: BatchView | None = None
    # Of this step's adapters, (slot, extra) by site index; empty for nearly every step.
    extras: Mapping[int, list[tuple[int, SiteExtra]]] = field(default_factory=dict)
    cache: dict[object, object] = field(
        default_factory=dict
    )  # routings of this step; cleared with `view`

    def set_view(self, view: BatchView | None) -> None:
        """Begin a step: `view` for the layers, and no routing of the step before."""
        self.view = view if view is not None and view.active_slots else None
        self.extras = self._extras() if self.installed and self.view is not None else NO_EXTRAS
        self.cache.clear()

    def _extras(self) -> dict[int, list[tuple[int, SiteExtra]]]:
        assert self.view is not None
        found: dict[int, list[tuple[int, SiteExtra]]] = {}
        for slot in self.view.active_slots:
            for site, extra in self.installed.get(slot, {}).items():
                found.setdefault(site, []).append((slot, extra))
        return found
