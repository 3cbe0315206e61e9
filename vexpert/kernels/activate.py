"""The formulas of `activations` on float32 tiles of gate and up."""

import triton
import triton.language as tl


@triton.jit
def _tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def activate(g, u, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """The activation NAME of tiles g and u in float32."""
    if NAME == "silu":
        out = g * tl.sigmoid(g) * u
    elif NAME == "gelu":
        out = 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476)) * u
    elif NAME == "gelu_tanh":
        out = 0.5 * g * (1.0 + _tanh(0.7978845608028654 * (g + 0.044715 * g * g * g))) * u
    elif NAME == "clamped_swiglu":
        c = tl.minimum(g, LIMIT)
        out = c * tl.sigmoid(ALPHA * c) * (tl.clamp(u, -LIMIT, LIMIT) + 1.0)
    else:
        tl.static_assert(NAME == "relu2")
        out = tl.maximum(g, 0.0) * tl.maximum(g, 0.0)
    return out
