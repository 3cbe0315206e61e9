"""The two forms of a product with many outputs: equal, and chosen only where it can matter."""

import pytest
import torch
from torch.nn import functional

from vexpert.ops import wide_linear
from vexpert.ops.wide_linear import choose_linear, few_rows_linear


@pytest.mark.parametrize("shape", [(1,), (1, 1), (1, 8), (32,), (0,)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_equal_the_usual_product(shape: tuple[int, ...], has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 64, generator=generator)
    bias = torch.randn(300, generator=generator) if has_bias else None
    x = torch.randn(*shape, 64, generator=generator)
    y = few_rows_linear(x, weight, bias)
    assert y.is_contiguous()
    torch.testing.assert_close(y, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


def test_small_or_half_weights_are_not_measured() -> None:
    assert choose_linear(torch.empty(1000, 64)) is functional.linear
    assert choose_linear(torch.empty(1 << 14, 1 << 8, dtype=torch.float16)) is functional.linear


@pytest.mark.parametrize(
    ("slow", "expected"), [("x W^T", [True, True, False]), ("W x^T", [False] * 3)]
)
def test_the_faster_form_runs_up_to_the_rows_at_which_it_won(
    slow: str, expected: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(product: object, *operands: torch.Tensor) -> float:
        is_usual = product is functional.linear
        return 2.0 if is_usual == (slow == "x W^T") and operands[0].shape[0] <= 8 else 1.5

    calls: list[int] = []

    def counted(x: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        calls.append(x.shape[0])
        return few_rows_linear(x, *operands)

    monkeypatch.setattr(wide_linear, "_measured", {})
    monkeypatch.setattr(wide_linear, "_seconds", seconds)
    monkeypatch.setattr(wide_linear, "ROWS", (1, 8))
    monkeypatch.setattr(wide_linear, "few_rows_linear", counted)
    weight = torch.zeros(1 << 14, 1 << 8)
    product = choose_linear(weight)
    for rows in (1, 8, 9):
        product(torch.zeros(rows, 1 << 8), weight, None)
    assert [rows in calls for rows in (1, 8, 9)] == expected
