"""lm_head of half dtypes gives float32 logits: never rounded on their way, whatever adapts it.

PyTorch's library has such products on a GPU alone; elsewhere `library` stands in for it, and all
around it is what runs there. Tests marked `gpu` run the library's own.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers_adapters import TargetBuilder
from helpers_dense import make_packed
from helpers_graphs import capture
from helpers_lora import relative_error
from helpers_models import Driver, random_sequences, served, tiny_model
from test_kernels_dense import PLANS
from torch import nn

from vexpert.config import EngineConfig
from vexpert.kernels.dense_order import order_rows
from vexpert.lora.layers import LoraLmHead
from vexpert.lora.pack import pack
from vexpert.lora.pool import SlotPool
from vexpert.lora.site_extras import SiteExtra
from vexpert.lora.types import AdapterWeights, BatchView, Factors, LinearTarget, LoraState
from vexpert.models.invariant import InvariantProducts
from vexpert.models.loader import serve
from vexpert.models.swap import WideHead
from vexpert.models.types import StepInput
from vexpert.ops import float32_linear
from vexpert.ops.backend import select_backend
from vexpert.ops.packed_linear import packed_linear

DEPTH, VOCAB = 24, 40
SLOTS = [0, -1, 1, 0, 2, -1, 1, 0, 2, 0]
# The interpreter does not multiply bfloat16; PyTorch's classic path multiplies in float32.
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter, and a stand-in")
WAYS = [
    pytest.param("triton", torch.float16, "cpu", marks=ON_CPU),
    pytest.param("torch", torch.bfloat16, "cpu", marks=ON_CPU),
    pytest.param("triton", torch.bfloat16, "cuda", marks=pytest.mark.gpu),
]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 sums of half dtypes wherever the test runs."""
    if torch.cuda.is_available():
        return
    monkeypatch.setattr(
        float32_linear, "has_float32_sums", lambda weight: weight.dtype in float32_linear.HALF
    )
    monkeypatch.setattr(float32_linear, "float32_sums", lambda x, w: x.float() @ w.float().t())


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """On a GPU sums are added up in float32, but not as exactly."""
    assert got.dtype == torch.float32
    atol = 1e-4 if got.is_cuda else 1e-5
    torch.testing.assert_close(got, want.to(got.device), rtol=1e-5, atol=atol)


class Head:
    """A head with three adapters whose shrunk rows are whole numbers: no dtype rounds them."""

    def __init__(
        self, backend: str, dtype: torch.dtype, device: str, bias: bool, times: int = 1
    ) -> None:
        torch.manual_seed(0)
        self.slots, self.device = SLOTS * times, torch.device(device)
        build = TargetBuilder()
        self.target: LinearTarget = build.linear("head", DEPTH, VOCAB)
        targets = build.build()
        pool = SlotPool(targets, 4, 1 << 20, self.device, dtype)
        self.factors = []
        for rank in (2, 5, 8):
            a = torch.randint(-1, 2, (1, rank, DEPTH)).to(dtype)
            b = (0.1 * torch.randn(1, VOCAB, rank)).to(dtype)
            self.factors.append((a[0].float(), b[0].float()))
            pool.install(pack(AdapterWeights({"head": Factors(a, b, 1.0)}), targets, dtype))
        self.state = LoraState(tables=pool.tables)
        linear = nn.Linear(DEPTH, VOCAB, bias=bias).to(dtype).requires_grad_(False)
        self.weight, own = linear.weight.float(), linear.bias
        self.own_bias = None if own is None else own.float()
        linear.to(self.device)
        chosen = select_backend(backend, device, dtype)
        self.head = LoraLmHead.wrap(linear, self.target, self.state, chosen)
        self.x = torch.randint(-2, 3, (len(self.slots), DEPTH)).to(dtype)
        self.there = self.x.to(self.device)[None]
        self.is_classic = backend == "torch"

    def begin(self) -> None:
        mine = torch.tensor(self.slots, device=self.device)
        others = mine.roll(1).repeat(2)  # of the step's tokens
        self.state.set_view(BatchView(others, mine, (0, 1, 2), not self.is_classic))

    def run(self) -> torch.Tensor:
        """[R, V] of the view that is set."""
        y: torch.Tensor = self.head(self.there)
        assert y.shape == (1, len(self.slots), VOCAB)
        return y[0]

    def base(self, weight: torch.Tensor | None = None) -> torch.Tensor:
        y = self.x.float() @ (self.weight if weight is None else weight.float()).t()
        return y if self.own_bias is None else y + self.own_bias

    def expected(self) -> torch.Tensor:
        y = self.base()
        for row, slot in enumerate(self.slots):
            if slot >= 0:
                a, b = self.factors[slot]
                y[row] += b @ (a @ self.x[row].float())
        return y


def make_extra(kind: str, given: Head, want: torch.Tensor) -> SiteExtra | None:
    """What slot 0 has beyond factors; `want` [R, V] becomes what is then to come out, in place."""
    mine = torch.tensor([slot == 0 for slot in given.slots])
    if kind == "dora":
        gain, shift = torch.rand(1, VOCAB) + 0.5, torch.randn(1, VOCAB)
        want[mine] = want[mine] * gain[0] + shift[0]
        return SiteExtra(gain=gain.to(given.device), shift=shift.to(given.device))
    if kind == "full":
        weight = torch.randn(VOCAB, DEPTH).to(given.x.dtype)
        want[mine] = given.base(weight)[mine]
        return SiteExtra(weight=weight.to(given.device))
    if kind == "tokens":
        ids, rows = torch.tensor([3, 17, 39]), torch.randn(3, DEPTH).to(given.x.dtype)
        own = given.x.float() @ rows.float().t()
        own = own if given.own_bias is None else own + given.own_bias[ids]
        want[mine] = want[mine].index_copy(1, ids, own[mine])
        return SiteExtra(token_ids=ids.to(given.device), token_rows=rows.to(given.device))
    return None


@torch.inference_mode()
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("backend", "dtype", "device"), WAYS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "full", "tokens"])
def test_an_adapted_head(
    kind: str, bias: bool, backend: str, dtype: torch.dtype, device: str
) -> None:
    given = Head(backend, dtype, device, bias)
    alone = given.run()
    close(alone, given.base())
    given.begin()
    want = given.expected()
    extra = make_extra(kind, given, want)
    if extra is not None:
        given.state.extras = {given.target.site.index: [(0, extra)]}
    got = given.run()
    close(got, want)
    if device == "cpu":  # on a GPU steps with and without adapters may have other products
        idle = torch.tensor([slot < 0 for slot in given.slots])
        assert torch.equal(got[idle], alone[idle])
    with pytest.raises(AssertionError):  # rounded once, it would be seen
        close(got.to(dtype).float(), want)


@torch.inference_mode()
@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 3, 20, 120])
def test_an_adapted_head_in_a_graph(times: int) -> None:
    """Numbers of rows whose plans differ; captured, the shrink runs beside the product."""
    given = Head("triton", torch.bfloat16, "cuda", True, times)
    given.begin()
    close(given.run(), given.expected())
    given.begin()  # what is shared by a step's layers is of the graph then
    torch.cuda.synchronize()
    graph, got = capture(given.run)
    got.zero_()
    graph.replay()
    close(got, given.expected())


@pytest.mark.usefixtures("library")
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_dense_gpu.py has tiles for that")
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_of_kernels(name: str) -> None:
    """Of a head with LoRA the sums, and what is added to them."""
    case = make_packed(9, 48, (80,), bias=True, dtype=torch.float16)
    order = order_rows(case.slots, case.num_slots)
    given = case.x, case.weight, case.bias
    alone = packed_linear(*given, None, None, PLANS[name], torch.float32)
    both = packed_linear(*given, case.lora(), order, PLANS[name], torch.float32)
    assert alone.dtype == both.dtype == torch.float32
    assert relative_error(alone, case.reference(False)) < 1e-6
    error = relative_error(both, case.reference(True))
    assert error < 1.5e-4  # shrunk rows are rounded
    rounded = packed_linear(*given, case.lora(), order, PLANS[name])
    assert error < 0.7 * relative_error(rounded, case.reference(True))


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter")
def test_products_that_do_not_depend_on_the_batch() -> None:
    """The library's own product is asked for; the fixed kernel answers."""
    backend = select_backend("triton", "cpu", torch.float16, None, True)
    x, weight = torch.randn(5, DEPTH).half(), torch.randn(VOCAB, DEPTH).half()
    bias = torch.randn(VOCAB).half()
    with InvariantProducts(backend):
        got = float32_linear.float32_linear(x[None], weight, bias)
    close(got[0], x.float() @ weight.float().t() + bias.float())


def scaled(model: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits / model.config.logits_scaling


def capped(model: Any, logits: torch.Tensor) -> torch.Tensor:
    cap = model.config.final_logit_softcapping
    return (logits / cap).tanh() * cap


def as_is(model: Any, logits: torch.Tensor) -> torch.Tensor:
    return logits


MODELS: list[tuple[str, dict[str, Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = [
    ("qwen3_moe", {}, as_is),
    ("qwen3_moe", {"tie_word_embeddings": True}, as_is),
    ("granitemoe", {"logits_scaling": 3.0}, scaled),
    ("gemma2", {"final_logit_softcapping": 5.0}, capped),
]


def moved(step: StepInput, device: str) -> StepInput:
    there = {
        name: value.to(device)
        for name, value in vars(step).items()
        if isinstance(value, torch.Tensor)
    }
    return replace(step, **there)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("enable_lora", [False, True])
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize(("model_type", "options", "after"), MODELS)
def test_models(
    model_type: str, options: dict[str, Any], after: Any, device: str, enable_lora: bool
) -> None:
    model = tiny_model(model_type, **options).to(device, torch.bfloat16)
    config = EngineConfig(model="tiny", device=device, enable_lora=enable_lora)
    ours = serve(model, model.config, config, torch.bfloat16, torch.device(device))
    assert ours.info.logits_dtype == torch.float32
    head = model.get_output_embeddings()
    assert type(head) is (LoraLmHead if enable_lora else WideHead)
    inputs: list[torch.Tensor] = []
    head.register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    driver = Driver(ours)
    (ids,) = random_sequences(1, 12, seed=3)
    step = moved(driver.whole_step(ids, [2, 5, 11]), device)
    logits = ours.raw_logits(step)
    assert inputs[-1].dtype == torch.bfloat16
    want = inputs[-1].float() @ head.weight.float().t()
    close(logits, after(model, want[0]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's own products")
def test_a_cpu_keeps_the_models_dtype() -> None:
    ours = served(tiny_model("qwen3_moe").to(torch.bfloat16))
    assert ours.info.logits_dtype == torch.bfloat16
    step = Driver(ours).whole_step([5, 9, 3], [2])
    assert ours.raw_logits(step).dtype == torch.bfloat16
    assert ours.forward(step).dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", float32_linear.HALF)
@pytest.mark.parametrize("rows", [0, 1, 7, 300])
def test_the_librarys_product(rows: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 256, device="cuda").to(dtype)
    weight, bias = (torch.randn(*shape, device="cuda").to(dtype) for shape in ((999, 256), (999,)))
    with torch.inference_mode():
        got = float32_linear.float32_linear(x[None], weight, bias)
    want = x.double() @ weight.double().t() + bias.double()
    assert got.shape == (1, rows, 999)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=5e-4)
