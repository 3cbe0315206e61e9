"""A real model's decode steps in graphs equal its eager steps, with adapters that come and go.

On the CPU a "capture" calls the model on the static buffers. There PyTorch's operations run, and
the slow reference of paged attention, which reads tables and lengths as the kernels do; one short
test has the kernels themselves, in Triton's interpreter. Tests marked `gpu` replay CUDA graphs.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_engine import EagerCapturer, FakeTokenizer
from helpers_extras import FOLDER, Files, make_model
from helpers_writers import linear_keys, per_expert_keys, random_adapter
from torch.utils._python_dispatch import TorchDispatchMode

from vexpert.config import EngineConfig
from vexpert.engine.engine import Engine
from vexpert.engine.graph_buffers import Decoded
from vexpert.engine.graphs import DecodeGraphs
from vexpert.engine.request import Sequence
from vexpert.engine.sampling_params import SamplingParams
from vexpert.engine.scheduler import Chunk
from vexpert.engine.warmup import WarmUp, _signatures, powers, run_steps
from vexpert.models.loader import serve
from vexpert.models.served import TransformersModel
from vexpert.ops import attention as attention_ops
from vexpert.ops.attention_reference import reference_attention, reference_latent_attention

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PROMPT = [5, 9, 3, 14, 7, 39]
TOLERANCE = 2e-5  # of log-probabilities: other tiles, other order of float32 sums


class Models:
    """One tiny model with adapters on disk, for engines with graphs and without."""

    def __init__(self, root: Path, model_type: str = "qwen3_moe") -> None:
        self.model = make_model(model_type)
        self.files = Files(self.model, root)
        self.paths = {
            "all": self.files.save("all", self._factors(0)),
            "other": self.files.save("other", self._factors(1)),
            "attention": self.files.save("attention", self._factors(2, "self_attn.")),
        }

    def _factors(self, seed: int, part: str = "") -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        weights = random_adapter(self.files.targets, 2, 1.0, generator)
        keys = linear_keys(weights, self.files.targets)
        keys |= per_expert_keys(weights, self.files.targets)
        wanted = (".self_attn.", ".mlp.experts.")
        return {
            key: 0.3 * x
            for key, x in keys.items()
            if part in key and any(name in key for name in wanted)
        }

    def engine(self, device: str, with_graphs: bool = True, **options: Any) -> Engine:
        fixed = {"model": FOLDER, "device": device, "dtype": "float32", "max_lora_rank": 8}
        sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 48}
        cache = {"block_size": 4, "kv_cache_memory": 1 << 20}
        cache |= {"lora_memory": 1 << 26, "lora_host_memory": 1 << 26}
        backend = {"lora_backend": "torch" if device == "cpu" else "triton"}
        backend["warm_up"] = "all" if with_graphs else "none"
        given = fixed | sizes | cache | backend | options
        config = EngineConfig.from_options(enforce_eager=not with_graphs, **given)
        place = torch.device(device)
        model = copy.deepcopy(self.model).to(place)
        ours = serve(model, self.model.config, config, torch.float32, place)
        assert isinstance(ours, TransformersModel)
        for layer in ours.layers:
            layer.use_kernels = True
        capturer = EagerCapturer() if with_graphs and device == "cpu" else None
        engine = Engine(config, model=ours, tokenizer=FakeTokenizer(), capturer=capturer)
        if with_graphs:
            graphs_of(engine)._share = 1.0  # no capture has to wait
        for name, path in self.paths.items():
            engine.load_adapter(name, str(path))
        return engine


def reference_write(
    key: torch.Tensor,
    value: torch.Tensor,
    cache_rows: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """What `write_cache` does, for finite values."""
    written = cache_rows >= 0
    keys[cache_rows[written]] = key[written]
    values[cache_rows[written]] = value[written]


@pytest.fixture
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, the reference in place of the kernels."""
    if request.node.callspec.params.get("device", "cpu") == "cpu":
        monkeypatch.setattr(attention_ops, "paged_attention", reference_attention)
        monkeypatch.setattr(attention_ops, "latent_attention", reference_latent_attention)
        monkeypatch.setattr(attention_ops, "write_cache", reference_write)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def latent_models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Of latent attention, with adapters on all of its projections, kv_b_proj too."""
    found = Models(tmp_path_factory.mktemp("latent"), "deepseek_v3")
    assert any("kv_b_proj" in key for key in found.files.factors)
    return found


@pytest.fixture
def either(request: pytest.FixtureRequest, which: str) -> Models:
    found = request.getfixturevalue(which)
    assert isinstance(found, Models)
    return found


KINDS = pytest.mark.parametrize("which", ["models", "latent_models"])


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=-1)


def graphs_of(engine: Engine) -> DecodeGraphs:
    found = engine._runner._graphs
    assert found is not None
    return found


def answers(engine: Engine, names: list[str | None], tokens: int = 5) -> list[torch.Tensor]:
    """Log-probabilities [tokens, V] of each request's steps, all in one batch."""
    for index, name in enumerate(names):
        prompt = [*PROMPT, *range(3, 3 + index)]
        engine.add_request(str(index), None, prompt, params(tokens), name)
    last = {}
    while engine.has_unfinished():
        last |= {output.request_id: output for output in engine.step()}
    engine.check_integrity()
    return [table(last[str(index)]) for index in range(len(names))]


def table(output: Any) -> torch.Tensor:
    rows = output.outputs[0].logprobs
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def assert_equal(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.argmax(-1), other.argmax(-1))
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


def _is_mask(indices: Any) -> bool:
    """Whether one of several indices is a mask, whose ones have to be counted."""
    given = indices if isinstance(indices, list | tuple) else [indices]
    return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in given)


class Waits(TorchDispatchMode):
    """Notes operations that a host would wait for: their result, or its shape, is needed there."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "_to_copy", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        name = func.overloadpacket.__name__
        masks = name.startswith("index") and any(_is_mask(index) for index in args[1:2])
        if name in self.NAMES or masks:
            self.seen.append(name)
        return func(*args, **(kwargs or {}))


class WatchingCapturer(EagerCapturer):
    """Watches the step of each capture."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Waits()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        with self.waits:
            return super().capture(run)


def test_waits_are_seen() -> None:
    x = torch.tensor([1, 0, 2])
    for wait in (lambda: x[0].item(), lambda: x[x > 0], x.nonzero, lambda: bool(x[1])):
        with Waits() as waits:
            wait()
        assert waits.seen, waits.count
    with Waits() as waits:
        torch.where(x > 0, x, -x)[x.clamp(max=1)]
    assert waits.count
    assert not waits.seen


@KINDS
def test_the_kernels_themselves(either: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter: three tokens of two requests, one of them with an adapter. Nothing in a
    captured step waits for the device.
    """
    capturer = WatchingCapturer()
    monkeypatch.setitem(globals(), "EagerCapturer", lambda: capturer)
    options = {"lora_backend": "triton", "max_num_seqs": 2, "max_loras": 2}
    engine = either.engine("cpu", **options, warm_up="none")
    got = answers(engine, [None, "all"], tokens=2)
    assert len(graphs_of(engine)._lora) == 1
    assert capturer.waits.count > 100
    assert not capturer.waits.seen
    assert_equal(got, answers(either.engine("cpu", False, **options), [None, "all"], tokens=2))
    options["lora_backend"] = "torch"  # LoRA by other code
    assert_equal(got, answers(either.engine("cpu", False, **options), [None, "all"], tokens=2))


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_replay_equals_eager(either: Models, device: str) -> None:
    """Base and adapters mixed in padded batches, and each request alone, in float32."""
    names = [None, "all", "attention", "other", "all"]
    engine = either.engine(device)
    graphs = graphs_of(engine)
    base = graphs.num_captured
    mixed = answers(engine, names)
    assert graphs.num_captured > base
    assert_equal(mixed, answers(either.engine(device, with_graphs=False), names))
    captured = graphs.num_captured
    for index in (0, 3):
        before = engine.stats().steps
        prompt = [*PROMPT, *range(3, 3 + index)]
        engine.add_request("alone", None, prompt, params(5), names[index])
        while engine.has_unfinished():
            outputs = engine.step()
        assert engine.stats().steps == before + 5
        assert_equal([table(outputs[0])], [mixed[index]])
    # One adapter in one row; the base's was there. On a GPU, whose steps overlap with the host, the
    # last of the mixed requests may have run alone.
    assert graphs.num_captured - captured in ((1,) if device == "cpu" else (0, 1))
    assert not graphs.is_off


def allocations() -> int:
    """Blocks that PyTorch has taken of the device's memory since the process started."""
    return int(torch.cuda.memory_stats()["allocation.all.allocated"])


@contextmanager
def no_waits() -> Iterator[None]:
    """Inside, an operation that waits for the device raises RuntimeError."""
    try:
        with warnings.catch_warnings():  # the mode is set, and PyTorch says it may miss some
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@KINDS
def test_a_decode_step_neither_waits_nor_allocates(
    either: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the host's view of the step to the replay, once its sequences are those of the last."""
    zero = torch.zeros(1, device="cuda")  # before it there are no statistics
    before, zero = allocations(), zero + 0
    assert allocations() > before  # either would be seen
    with pytest.raises(RuntimeError, match="synchroniz"), no_waits():
        zero.item()
    names: list[str | None] = [None, "all", "attention", "other"]
    engine = either.engine("cuda")
    graphs = graphs_of(engine)
    answers(engine, names, 16)  # every graph that is needed is captured
    captured, run = graphs.num_captured, graphs.run
    last: list[Sequence] = []
    taken: list[int] = []

    def watched(chunks: list[Chunk], chosen: torch.Tensor | None = None) -> Decoded | None:
        sequences = [chunk.sequence for chunk in chunks]
        if sequences != last:  # their tables of blocks are new
            last[:] = sequences
            return run(chunks, chosen)
        before = allocations()
        with no_waits():
            decoded = run(chunks, chosen)
        taken.append(allocations() - before)
        return decoded

    monkeypatch.setattr(graphs, "run", watched)
    answers(engine, names, 16)  # 4 blocks' worth of tokens
    assert graphs.num_captured == captured
    assert len(taken) >= 10
    assert not any(taken)


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("device", DEVICES)
@KINDS
def test_adapters_come_and_go_between_replays(either: Models, device: str) -> None:
    engine = either.engine(device, max_loras=2)
    first = answers(engine, ["all", "all", None])
    captured = graphs_of(engine).num_captured
    other = answers(engine, ["other", "other", None])  # the same graphs, another slot
    assert (first[0] - other[0]).abs().max() > 0.01
    engine.unload_adapter("all")
    engine.load_adapter("all", str(either.paths["other"]))
    assert_equal(answers(engine, ["all", "all", None]), other)
    engine.load_adapter("all", str(either.paths["all"]), load_inplace=True)
    answers(engine, ["attention"], tokens=1)  # takes a slot: somebody leaves
    assert_equal(answers(engine, ["all", None, "all"])[:1], first[:1])
    assert graphs_of(engine).num_captured == captured
    engine.check_integrity()


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("device", DEVICES)
def test_prompts_join_and_requests_end_between_replays(models: Models, device: str) -> None:
    engine = models.engine(device)
    expected = answers(models.engine(device, with_graphs=False), [None, "all", "other"], 10)
    for index, name in enumerate([None, "all", "other"]):
        prompt = [*PROMPT, *range(3, 3 + index)]
        engine.add_request(str(index), None, prompt, params(10), name)
    last = {}
    for step in range(16):
        if step == 2:
            engine.add_request("joins", None, PROMPT * 3, params(20), "attention")
        if step == 5:
            engine.abort("joins")
        last |= {output.request_id: output for output in engine.step()}
    assert "joins" in last
    assert_equal([table(last[str(index)]) for index in range(3)], expected)
    assert not graphs_of(engine).is_off


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("device", ["cpu"])
def test_a_graph_without_the_site_of_an_adapter_would_be_wrong(models: Models, device: str) -> None:
    """The signature matters: an adapter of all sites in a graph of attention alone."""
    engine = models.engine(device)
    right = answers(engine, ["all"], 3)
    wrong = models.engine(device)
    answers(wrong, ["attention"], 3)
    graphs = graphs_of(wrong)
    (replay,) = graphs._lora.values()
    graphs._find = lambda key, view: replay  # type: ignore[method-assign]
    assert (answers(wrong, ["all"], 3)[0][1:] - right[0][1:]).abs().max() > 0.01


@pytest.mark.usefixtures("attention")
@pytest.mark.parametrize("device", ["cpu"])
def test_steps_of_the_warm_up_run_with_and_without_lora(models: Models, device: str) -> None:
    engine = models.engine(device, with_graphs=False)
    seen: list[tuple[int, bool]] = []
    model = engine.model
    forward = model.raw_logits

    def watched(step: Any) -> torch.Tensor:
        assert step.kv_lens is not None
        seen.append((len(step.token_ids), step.lora is not None))
        logits = forward(step)
        assert torch.isfinite(logits).all()
        return logits

    model.raw_logits = watched  # type: ignore[method-assign]
    run_steps(model, WarmUp(8, 4, 20, 3))
    sizes = [1, 2, 3, 4, 8, 16, 20]
    assert seen == [(n, False) for n in sizes] + [(n, True) for n in sizes] * 2
    seen.clear()
    run_steps(model, WarmUp(8, 4, 20, 5, "decode"), only_last=True)
    assert [n for n, _ in seen] == [5] * 3
    seen.clear()
    run_steps(model, WarmUp(8, 4, 20, 5, "none"))
    assert not seen
    assert powers(20) == [1, 2, 4, 8, 16, 20]
    assert powers(0) == []


def test_the_head_and_embeddings_are_not_warmed_up(models: Models) -> None:
    model = models.engine("cpu", with_graphs=False).model
    base, one, many = _signatures(model)
    assert base is None
    assert one is not None
    assert many is not None
    assert (one.adapters, many.adapters) == (1, 32)
    for site in model.targets.sites:
        is_rare = "embed" in site.name or "lm_head" in site.name
        assert (one.ranks[site.index] == 0) == is_rare
        if site.name.endswith("gate_up"):
            assert one.ranks[site.index] == 32
