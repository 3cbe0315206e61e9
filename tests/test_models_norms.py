"""RMS norms on a CPU: the compiled kernel against its reference; only norms that agree change."""

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from vexpert.kernels.cpu_norm import reference_rms_norm, rms_norm
from vexpert.models.norms import MOST_ELEMENTS, CompiledRmsNorm, compile_norms


@pytest.mark.parametrize("shape", [(1, 1), (1, 256), (7, 100), (3, 2048)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_the_kernel_equals_its_reference(shape: tuple[int, int], size: float) -> None:
    generator = np.random.default_rng(0)
    x = (generator.standard_normal(shape) * size).astype(np.float32)
    weight = generator.standard_normal(shape[1]).astype(np.float32)
    y = np.empty_like(x)
    rms_norm(x, weight, np.float32(1e-6), y)
    np.testing.assert_allclose(y, reference_rms_norm(x, weight, 1e-6), rtol=1e-5, atol=1e-6)


def random_norm(kind: type[nn.Module], eps: float = 1e-6) -> nn.Module:
    norm = kind(64, eps)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    return norm


def test_norms_that_agree_are_replaced_and_share_their_weight() -> None:
    model = nn.ModuleDict({"norm": random_norm(Qwen3MoeRMSNorm)})
    norm, names = model["norm"], dict(model.named_parameters()).keys()
    assert compile_norms(model) == 1
    compiled = model["norm"]
    assert isinstance(compiled, CompiledRmsNorm)
    assert dict(model.named_parameters()).keys() == names
    assert compiled.weight is norm.weight
    assert compiled.variance_epsilon == 1e-6
    with torch.inference_mode():
        x = torch.randn(2, 3, 4, 64).transpose(1, 2)  # not contiguous
        torch.testing.assert_close(compiled(x), norm(x))
        norm.weight.mul_(2)
        torch.testing.assert_close(compiled(x), norm(x))
        assert compiled(x.half()).dtype == norm(x.half()).dtype
        large = torch.randn(MOST_ELEMENTS // 64 + 1, 64)
        assert torch.equal(compiled(large), norm(large))


class OutsideRMSNorm(Qwen3MoeRMSNorm):
    """eps is added to the root, not under it: seen only where rows are tiny."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


@pytest.mark.parametrize("kind", [Gemma2RMSNorm, OutsideRMSNorm])
def test_norms_with_another_formula_stay(kind: type[nn.Module]) -> None:
    model = nn.ModuleDict({"norm": random_norm(kind)})
    assert compile_norms(model) == 0
    assert type(model["norm"]) is kind
