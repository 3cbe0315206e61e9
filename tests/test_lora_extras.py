"""What adapters have beyond factors, through the engine: right in a mixed batch, gone after."""

import functools
from pathlib import Path

import pytest
import torch
from helpers_extras import (
    IDS,
    PREFIX,
    WRITERS,
    Files,
    Q,
    Writer,
    ask,
    dora,
    full_embedding,
    full_head,
    make_llm,
    make_model,
    merged_log_probs,
    plain,
    tokens,
)

from vexpert import LLM
from vexpert.errors import AdapterError
from vexpert.lora.layers import extras as extra_layers
from vexpert.lora.layers.extras import apply_extras
from vexpert.lora.layers.groups import RowGroups
from vexpert.lora.manager import AdapterManager
from vexpert.lora.site_extras import SiteExtra, plan_extras, view_extras, write_extras

TOLERANCE = 2e-4


@functools.cache
def model(model_type: str):
    return make_model(model_type)


def manager_of(llm: LLM) -> AdapterManager:
    manager = llm.engine._adapters
    assert isinstance(manager, AdapterManager)
    return manager


def load(llm: LLM, *paths: Path) -> list[str]:
    for path in paths:
        llm.load_adapter(path.name, str(path))
    return [path.name for path in paths]


def assert_right(files: Files, llm: LLM, names: list[str | None]) -> None:
    for name, table in zip(names, ask(llm, names, IDS), strict=True):
        path = None if name is None else files.root / name
        want = merged_log_probs(files, path, IDS)
        torch.testing.assert_close(
            table, want, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("model_type", WRITERS)
@pytest.mark.parametrize("virtual", [True, False])
def test_every_extra_in_one_batch(model_type: str, virtual: bool, tmp_path: Path) -> None:
    files = Files(model(model_type), tmp_path)
    llm = make_llm(files.model, max_loras=10, lora_use_virtual_experts=virtual)
    names = load(llm, *(write(files) for write in WRITERS[model_type]))
    base = merged_log_probs(files, None, IDS)
    for name in names:  # each must matter, or the test could not fail
        assert (merged_log_probs(files, tmp_path / name, IDS) - base).abs().max() > 0.01, name
    assert_right(files, llm, [None, *(n for name in names for n in (name, None)), *names])
    manager_of(llm).check_integrity()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("model_type", WRITERS)
def test_every_extra_on_a_gpu(model_type: str, tmp_path: Path) -> None:
    files = Files(model(model_type), tmp_path)
    llm = make_llm(files.model, "cuda:0", max_loras=10, kv_cache_memory=1 << 26)
    names = load(llm, *(write(files) for write in WRITERS[model_type]))
    assert_right(files, llm, [None, *(n for name in names for n in (name, None)), *names])
    manager_of(llm).check_integrity()


def test_trained_rows_of_a_tied_embedding_are_the_heads_too(tmp_path: Path) -> None:
    from helpers_models import tiny_model

    files = Files(tiny_model("qwen3_moe", tie_word_embeddings=True), tmp_path)
    assert files.model.lm_head.weight is files.model.get_input_embeddings().weight
    llm = make_llm(files.model)
    names = load(llm, tokens(files))
    assert_right(files, llm, [*names, None])


@pytest.mark.parametrize("writers", [(full_head, plain), (dora, plain), (full_embedding, tokens)])
def test_one_slot_keeps_nothing_of_the_adapter_before(
    writers: tuple[Writer, ...], tmp_path: Path
) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model, max_loras=1)
    names = load(llm, *(write(files) for write in writers))
    for name in (*names, None, *names):
        assert_right(files, llm, [name])
        manager_of(llm).check_integrity()


def test_extras_move_with_their_adapter(tmp_path: Path) -> None:
    """A hole before an adapter closes when a larger one needs the room."""
    files = Files(model("qwen3_moe"), tmp_path)
    small, middle, large = dora(files), full_head(files), full_embedding(files)
    sizes = [measure(files, path) for path in (small, middle, large)]
    llm = make_llm(files.model, lora_memory=sum(sizes) - min(sizes) // 2)
    load(llm, small, middle, large)
    assert_right(files, llm, [small.name])
    assert_right(files, llm, [middle.name])
    assert_right(files, llm, [large.name])  # evicts the oldest and moves the other
    state = {info.name: info.state for info in llm.adapters()}
    assert state == {small.name: "host", middle.name: "device", large.name: "device"}
    manager_of(llm).check_integrity()
    assert_right(files, llm, [middle.name, large.name, None])


def measure(files: Files, path: Path) -> int:
    """Bytes that an adapter takes on the device."""
    llm = make_llm(files.model)
    load(llm, path)
    ask(llm, [path.name], IDS)
    (info,) = llm.adapters()
    return info.device_bytes


def test_bytes_are_counted_and_given_back(tmp_path: Path) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model)
    path = full_head(files)
    load(llm, path)
    ask(llm, [path.name], IDS)
    (info,) = llm.adapters()
    head = files.model.lm_head.weight.nbytes
    assert info.host_bytes > head
    assert info.device_bytes >= info.host_bytes
    pool = manager_of(llm).pool
    assert pool.arena.used_bytes == info.device_bytes
    llm.unload_adapter(path.name)
    assert pool.arena.used_bytes == 0
    assert not pool.extras


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model, lora_memory=files.model.lm_head.weight.nbytes)
    with pytest.raises(AdapterError, match="lora_memory"):
        load(llm, full_head(files))


def test_a_new_version_replaces_the_extras(tmp_path: Path) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model)
    path = full_head(files)
    load(llm, path)
    assert_right(files, llm, [path.name])
    full_head(files)  # the same folder, other numbers
    llm.load_adapter(path.name, str(path), load_inplace=True)
    assert_right(files, llm, [path.name, None])


def test_batches_without_extras_never_ask_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model)
    load(llm, plain(files), dora(files))
    ask(llm, ["dora"], IDS)
    assert len(manager_of(llm).pool.extras) == 1  # it is on the device while others run

    def fail(*args: object) -> None:
        raise AssertionError("asked for extras")

    monkeypatch.setattr(extra_layers, "_scale", fail)
    assert_right(files, llm, ["plain", None])
    with pytest.raises(AssertionError, match="asked"):
        ask(llm, ["dora"], IDS)


def test_other_rows_stay_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(7, n, generator=generator) for n in (4, 5))
    y[3] = float("nan")  # a row that no one may read
    slots = torch.tensor([-1, 2, 0, -1, 2, 1, -1])
    extra = SiteExtra(
        weight=torch.randn(5, 4, generator=generator),
        token_ids=torch.tensor([1, 3]),
        token_rows=torch.randn(2, 4, generator=generator),
        gain=torch.rand(1, 5, generator=generator),
        shift=torch.randn(1, 5, generator=generator),
    )
    before, bias = y.clone(), torch.randn(5, generator=generator)
    apply_extras([(2, extra)], RowGroups(slots, None, None), x, y, None, bias)
    others = slots != 2
    assert torch.equal(y[others].view(torch.int32), before[others].view(torch.int32))
    assert extra.weight is not None
    assert extra.token_rows is not None
    weight = extra.weight.index_copy(0, torch.tensor([1, 3]), extra.token_rows)
    want = (x[~others] @ weight.T + bias) * extra.gain + extra.shift
    torch.testing.assert_close(y[~others], want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_buffer_of_any_dtype_holds_them(dtype: torch.dtype) -> None:
    extras = {
        4: SiteExtra(gain=torch.rand(3, 5), shift=torch.rand(1, 5)),
        1: SiteExtra(
            weight=torch.rand(3, 3), token_ids=torch.tensor([2]), token_rows=torch.rand(1, 3)
        ),
    }
    entries, end = plan_extras(extras, 16, dtype)
    buffer = torch.zeros(end + 32, dtype=dtype)
    write_extras(buffer, entries, extras)
    moved = torch.cat([torch.zeros(32, dtype=dtype), buffer])
    found = view_extras(moved, entries, 32)
    assert torch.equal(found[4].gain, extras[4].gain)
    assert torch.equal(found[4].shift, extras[4].shift)
    assert torch.equal(found[1].token_ids, torch.tensor([2]))
    assert torch.equal(found[1].weight, extras[1].weight.to(dtype))


def test_float16_that_overflows_is_refused() -> None:
    extras = {0: SiteExtra(weight=torch.full((2, 2), 1e6))}
    entries, end = plan_extras(extras, 0, torch.float16)
    with pytest.raises(AdapterError, match="float16"):
        write_extras(torch.zeros(end, dtype=torch.float16), entries, extras)


def norm(files: Files) -> Path:
    return files.save("norm", files.some(Q) | files.changed("model.norm.weight"))


def more_tokens(files: Files) -> Path:
    rows = len(files.model.lm_head.weight) + 2
    head = files.draw(rows, files.model.lm_head.weight.shape[1])
    return files.save("more_tokens", files.some(Q) | {f"{PREFIX}lm_head.weight": head})


def same_token_twice(files: Files) -> Path:
    key = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
    rows = files.draw(2, files.model.get_input_embeddings().weight.shape[1])
    twice = files.some(Q) | {key: rows}
    return files.save("twice", twice, trainable_token_indices=[3, 3])


def zero_direction(files: Files) -> Path:
    factors = files.with_magnitudes(files.some(".0.self_attn.q_proj."))
    weight = files.model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    factors = {k: x for k, x in factors.items() if "lora_B" not in k and "lora_A" not in k}
    stem = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_"
    row = torch.zeros(len(weight), 2)
    row[0, 0] = -1.0
    a = torch.stack([weight[0], weight[0]])
    cancels = factors | {f"{stem}A.weight": a, f"{stem}B.weight": row}
    return files.save("zero", cancels, use_dora=True, alpha_pattern={"q_proj": 2})


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (norm, "full weights of norms"),
        (more_tokens, "vocabulary of another size"),
        (same_token_twice, "twice"),
        (zero_direction, "row of the weight with its delta is zero"),
    ],
)
def test_refused(write: Writer, match: str, tmp_path: Path) -> None:
    files = Files(model("qwen3_moe"), tmp_path)
    llm = make_llm(files.model)
    with pytest.raises(AdapterError, match=match):
        llm.load_adapter("x", str(write(files)))
    assert llm.adapters() == []


def test_a_routers_bias_is_refused(tmp_path: Path) -> None:
    files = Files(model("gpt_oss"), tmp_path)
    changed = files.changed("model.layers.0.mlp.router.bias")
    path = files.save("router_bias", files.some(Q) | changed)
    with pytest.raises(AdapterError, match=r"replaces model\.layers\.0\.mlp\.router\.bias"):
        make_llm(files.model).load_adapter("x", str(path))


@pytest.mark.parametrize("virtual", [True, False])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_extras_of_what_expands_latents(device: str, virtual: bool, tmp_path: Path) -> None:
    """kv_b_proj is absorbed: what an adapter adds to its keys and values meets queries and sums."""
    files = Files(model("deepseek_v3"), tmp_path)
    both = [f"model.layers.{i}.self_attn.kv_b_proj.weight" for i in range(2)]
    factors = files.some("kv_b_proj")
    paths = (
        files.save("factors", factors),
        files.save("dora", files.with_magnitudes(factors), use_dora=True),
        files.save("bias", files.with_biases(factors), lora_bias=True),
        files.save("full", files.changed(both[0]) | files.some("layers.1.self_attn.kv_b_proj")),
        files.save("weights", files.changed(*both) | files.some("o_proj")),
    )
    options = {"lora_use_virtual_experts": virtual, "max_loras": 5, "kv_cache_memory": 1 << 24}
    llm = make_llm(files.model, device, **options)
    names = load(llm, *paths)
    base = merged_log_probs(files, None, IDS)
    for name in names:
        assert (merged_log_probs(files, tmp_path / name, IDS) - base).abs().max() > 0.01, name
    assert_right(files, llm, [None, *(n for name in names for n in (name, None)), *names])
