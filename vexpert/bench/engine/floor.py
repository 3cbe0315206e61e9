"""What a decode step must read at least: the bytes of weights, factors and KV that it touches."""

from dataclasses import dataclass

from vexpert.bench.engine.files import ModelShape


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one step, expected where experts are drawn uniformly."""

    base: float
    lora: float

    @property
    def share(self) -> float:
        """The most that a step with adapters can have of the base's tokens/s."""
        return self.base / (self.base + self.lora)


def distinct(experts: int, top_k: int, rows: float) -> float:
    """Expected number of different experts that `rows` tokens reach, `top_k` different ones each.

    experts * (1 - (1 - top_k / experts) ** rows)
    """
    missed: float = (1 - top_k / experts) ** rows
    return experts * (1 - missed)


def step_bytes(
    shape: ModelShape, batch: int, adapters: int, rank: int, context: int, base_share: float = 0.0
) -> StepBytes:
    """One decode step of `batch` rows in bfloat16, `context` tokens each; adapters share the rows
    that are not base equally."""
    dense = sum(a * b for a, b in shape.linears().values()) + shape.hidden * shape.experts
    expert = sum(a * b for a, b in shape.expert().values())
    touched = distinct(shape.experts, shape.top_k, batch)
    kv = 2 * shape.kv_heads * shape.head_dim * context * batch
    base = shape.layers * (dense + expert * touched + kv) + shape.vocab * shape.hidden
    rows = batch * (1 - base_share) / max(1, adapters)
    dense_factors = sum(a + b for a, b in shape.linears().values())
    factors = sum(a + b for a, b in shape.expert().values())
    reached = distinct(shape.experts, shape.top_k, rows)
    lora = shape.layers * rank * adapters * (dense_factors + factors * reached)
    return StepBytes(2.0 * base, 2.0 * lora)
