"""The norm, rope and router kernels against PyTorch with the same roundings."""

import itertools

import pytest
import torch

from vexpert.kernels.combine import combine
from vexpert.kernels.combine_norm import combine_norm
from vexpert.kernels.norm_router import Router, Scratch, norm_router
from vexpert.kernels.norms import FORMS, Norm, reference_rms_norm
from vexpert.kernels.rms_norm import add_rms_norm, rms_norm
from vexpert.kernels.rope_angles import LAYOUTS, Angles, reference_rope_angles, rope_angles
from vexpert.kernels.rope_arguments import Heads, Rope
from vexpert.kernels.rope_write import reference_rotate, rope_write
from vexpert.kernels.router_topk import Choice, reference_router_topk, router_topk

# Triton's interpreter multiplies bfloat16 as the integers it keeps them in: a GPU has all three.
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = [pytest.mark.gpu] if GPU else []  # `-m gpu` takes them there, on the device
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}  # 2 units at most


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor, atol: float = 0.1) -> None:
    """`atol` in units of the relative limit."""
    limit = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=limit, atol=atol * limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3, 40), (1, 256), (70, 12), (2, 3, 1500)])
def test_norm(shape: tuple[int, ...], form: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    width = shape[-1]
    norm = Norm(random(width, dtype=dtype) if form != "plain" else None, width, 1e-5, form)
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    assert_close(rms_norm(x, norm), reference_rms_norm(x, norm))
    sliced = torch.cat((x, x), -1)[..., :width]  # rows are not adjacent
    assert torch.equal(rms_norm(sliced, norm), rms_norm(x, norm))
    for multiplier in (1.0, 0.22):
        before = x.clone(), residual.clone()
        total, y = add_rms_norm(x, residual, norm, multiplier)
        want = residual + (x * multiplier if multiplier != 1.0 else x)
        # On a GPU a multiply-add rounds once, not twice.
        slack = 1e-6 if GPU and dtype == torch.float32 else 0.0
        torch.testing.assert_close(total, want, rtol=slack, atol=slack)
        assert_close(y, reference_rms_norm(want, norm))
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


def test_the_forms_of_a_norm_differ() -> None:
    torch.manual_seed(0)
    x = random(4, 64)
    weight = random(64)
    got = [rms_norm(x, Norm(weight, 64, 1e-5, form)) for form in FORMS if form != "wide"]
    assert all((a - b).abs().max() > 0.1 for a, b in itertools.combinations(got, 2))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_angles(layout: str, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 3, 70, 4000], device=DEVICE)
    frequencies = 10000.0 ** (-torch.arange(6, device=DEVICE) / 6)
    how = positions, Angles(frequencies, 1.3, layout, dtype)
    for got, want in zip(rope_angles(*how), reference_rope_angles(*how), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=1e-5)


CACHE_ROWS = 20


def norms(kind: str, heads: int, d: int, dtype: torch.dtype) -> Norm | None:
    width = {"none": 0, "head": d, "all": heads * d}[kind]
    return Norm(random(width, dtype=dtype), width, 1e-5, "rounded") if width else None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "num_q", "num_kv", "d", "rope", "kind"),
    [
        (5, 4, 2, 16, Rope(16), "head"),
        (3, 6, 2, 12, Rope(12), "all"),
        (34, 3, 1, 16, Rope(8), "head"),
        (4, 4, 4, 12, Rope(12, interleaved=True), "none"),
        (4, 4, 2, 16, Rope(8, interleaved=True, step=2), "all"),
        (7, 5, 1, 20, Rope(0), "none"),
    ],
)
def test_rope_write(
    tokens: int, num_q: int, num_kv: int, d: int, rope: Rope, kind: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    packed = random(tokens, (num_q + 2 * num_kv) * d, dtype=dtype)
    q, k, v = packed.split([num_q * d, num_kv * d, num_kv * d], dim=1)
    angles = torch.rand(tokens, max(rope.width, 1), device=DEVICE) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    heads = Heads(num_q, num_kv, d, norms(kind, num_q, d, dtype), norms(kind, num_kv, d, dtype))
    rows = torch.randperm(2 * CACHE_ROWS, device=DEVICE)[:tokens]
    rows[1] = -1  # of a captured graph's padding
    before = random(2 * CACHE_ROWS, num_kv, d, dtype=dtype)
    keys, values = before.clone(), before.clone()
    got = rope_write(q, k, v, heads, rope, (cos, sin), rows, (keys, values))
    want = reference_rotate(q.view(tokens, num_q, d), heads.q_norm, rope, (cos, sin))
    atol = 0.5 if GPU else 0.1  # which may round a product less: it shows where two cancel
    assert_close(got, want, atol)
    want_keys, want_values = before.clone(), before.clone()
    mine = rows >= 0
    k_want = reference_rotate(k.view(tokens, num_kv, d), heads.k_norm, rope, (cos, sin))
    want_keys[rows[mine]] = k_want[mine]
    want_values[rows[mine]] = v.view(tokens, num_kv, d)[mine]
    assert_close(keys, want_keys, atol)
    assert torch.equal(values, want_values)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_what_is_not_finite_stays_out_of_the_cache() -> None:
    packed = torch.ones(2, 3 * 16, device=DEVICE)
    packed[0, 16], packed[0, 33], packed[1, 40] = float("nan"), float("inf"), float("-inf")
    q, k, v = packed.split(16, dim=1)
    ones = torch.ones(2, 16, device=DEVICE)
    cache = torch.full((3, 1, 16), 7.0, device=DEVICE), torch.full((3, 1, 16), 7.0, device=DEVICE)
    rows = torch.tensor([2, 0], device=DEVICE)
    rope_write(q, k, v, Heads(1, 1, 16), Rope(16), (ones, 0 * ones), rows, cache)
    want_keys, want_values = cache[0].clone(), cache[1].clone()
    keys, values = torch.ones(3, 1, 16), torch.ones(3, 1, 16)
    keys[1], values[1] = 7.0, 7.0
    keys[2, 0, [0, 8]] = 0.0  # NaN times a sine of 0 is NaN
    values[2, 0, 1] = values[0, 0, 8] = 0.0
    assert torch.equal(want_keys.cpu(), keys)
    assert torch.equal(want_values.cpu(), values)


CHOICES = {
    "softmax": Choice("softmax", 3),
    "renormalised": Choice("softmax", 4, renormalise=True),
    "sigmoid": Choice("sigmoid", 2, renormalise=True, scale=2.5, sum_add=1e-20),
    "chosen": Choice("chosen", 4),
    "groups": Choice("sigmoid", 3, renormalise=True, groups=4, top_groups=2),
    "groups-max": Choice("softmax", 3, groups=4, top_groups=2, group_two=False, scale=16.0),
    "least-sum": Choice("softmax", 2, renormalise=True, sum_min=0.9),
}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("tokens", "experts"), [(4, 60), (1, 128)])
def test_choice(name: str, with_bias: bool, tokens: int, experts: int) -> None:
    torch.manual_seed(experts)
    choice = CHOICES[name]
    logits = torch.cat((random(tokens, experts), random(tokens, 4)), 1)[:, :experts]
    bias = random(experts) if with_bias else None
    ids, weights = router_topk(logits, bias, choice, torch.float32)
    want_ids, want = reference_router_topk(logits, bias, choice)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want, rtol=1e-5, atol=1e-7)
    low = router_topk(logits, bias, choice, torch.float16)[1]
    torch.testing.assert_close(low, want.half(), rtol=2e-3, atol=1e-6)


def test_equal_logits_go_to_the_lowest_expert() -> None:
    logits = torch.zeros(2, 10, device=DEVICE)
    logits[1, 7] = logits[1, 4] = 1.0
    ids, weights = router_topk(logits, None, Choice("softmax", 3, renormalise=True), torch.float32)
    assert ids.tolist() == [[0, 1, 2], [4, 7, 0]]
    torch.testing.assert_close(weights[0].cpu(), torch.full((3,), 1 / 3))


@pytest.mark.filterwarnings("ignore:(invalid value|All-NaN slice) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", CHOICES)
def test_ids_are_valid_whatever_the_logits(name: str) -> None:
    logits = torch.zeros(4, 12, device=DEVICE)
    logits[0] = float("nan")
    logits[1] = float("inf")
    logits[2, 1:] = float("-inf")
    logits[3, 5] = float("nan")
    choice = CHOICES[name]
    ids = router_topk(logits, None, choice, torch.float32)[0].tolist()
    assert all(len(set(row)) == choice.top_k and 0 <= min(row) <= max(row) < 12 for row in ids)
    if choice.score != "softmax":  # which mixes a NaN into all scores
        assert 5 not in ids[3]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "experts"), [(3, 40, 12), (1, 600, 70), (20, 24, 8)])
@pytest.mark.parametrize("name", ["renormalised", "sigmoid"])
def test_norm_and_router(
    name: str, tokens: int, width: int, experts: int, dtype: torch.dtype
) -> None:
    """As in separate launches, twice over one scratch."""
    torch.manual_seed(width)
    x, residual = random(tokens, width, dtype=dtype), random(tokens, width, dtype=dtype)
    norm = Norm(random(width, dtype=dtype), width, 1e-5, "rounded")
    weight = random(experts, width, dtype=dtype)
    bias = random(experts, dtype=dtype) if name == "sigmoid" else None
    choice_bias = random(experts) if name == "sigmoid" else None
    router = Router(weight, bias, CHOICES[name], choice_bias, False, torch.float32)
    scratch = Scratch.empty(experts + 3, x.device)
    scratch.logits.fill_(float("nan"))
    for multiplier in (1.0, 0.3):
        total, normed, ids, weights = norm_router(x, residual, norm, multiplier, router, scratch)
        want_total, want_normed = add_rms_norm(x, residual, norm, multiplier)
        assert torch.equal(total, want_total)
        if GPU:  # a row's sum may have another order
            assert_close(normed, want_normed)
        else:
            assert torch.equal(normed, want_normed)
        wide = None if bias is None else bias.float()
        logits = torch.nn.functional.linear(normed.float(), weight.float(), wide)
        want_ids, want = reference_router_topk(logits, choice_bias, CHOICES[name])
        assert torch.equal(ids, want_ids)
        torch.testing.assert_close(weights, want, rtol=1e-4, atol=1e-6)
        assert not scratch.arrivals.any()


def test_logits_round_like_a_product_in_half_precision() -> None:
    x = torch.zeros(1, 16, dtype=torch.float16, device=DEVICE)
    residual = torch.ones_like(x)
    norm = Norm(None, 16, 0.0, "plain")  # all ones
    weight = torch.zeros(4, 16, dtype=torch.float16, device=DEVICE)
    weight[:, 0] = 2048.0
    weight[1, 1] = weight[3, 1] = 0.5  # lost next to 2048 in half precision
    for rounds, expected in ((True, [0, 1]), (False, [1, 3])):
        router = Router(weight, None, Choice("chosen", 2), None, rounds, torch.float32)
        scratch = Scratch.empty(4, x.device)
        assert norm_router(x, residual, norm, 1.0, router, scratch)[2].tolist() == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", [None, "rounded", "one_plus"])
def test_combine_and_norm(form: str | None, dtype: torch.dtype) -> None:
    """As in separate launches; what a sentinel's row holds is not read."""
    torch.manual_seed(5)
    tokens, top_k, width, experts = 5, 3, 40, 6
    y = random(tokens * top_k, width, dtype=dtype)
    ids = torch.randint(0, experts, (tokens * top_k,), device=DEVICE)
    ids[2], ids[7] = -1, experts
    y[2], y[7] = float("nan"), float("inf")
    residual = random(tokens, 2 * width, dtype=dtype)[:, :width]
    norm = None if form is None else Norm(random(width, dtype=dtype), width, 1e-5, form)
    for weights, multiplier in ((None, 1.0), (random(tokens, top_k), 0.3)):
        combined = combine(y, ids, weights, experts, top_k)
        total, normed = combine_norm(y, ids, weights, experts, residual, multiplier, norm)
        want = residual + (combined * multiplier if multiplier != 1.0 else combined)
        assert_close(total, want)
        if norm is None:
            assert normed is None
        else:
            assert_close(normed, reference_rms_norm(total, norm))
