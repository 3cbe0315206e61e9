"""A decode step's own launches: its inputs, and the likeliest token of each row."""

import itertools

import numpy as np
import pytest
import torch

from vexpert.engine.decode_rows import RowArrays, buffer_size, row_bounds
from vexpert.engine.logit_adjust import Changes
from vexpert.kernels.adjust_logits import (
    change_logits,
    mask_rows,
    reference_change_logits,
    reference_mask_rows,
)
from vexpert.kernels.argmax import Scratch, argmax_rows, reference_argmax_rows
from vexpert.kernels.decode_inputs import decode_inputs
from vexpert.kernels.embed import embed
from vexpert.kernels.norms import Norm, reference_rms_norm
from vexpert.kernels.rms_norm import rms_norm
from vexpert.kernels.rope_angles import LAYOUTS, Angles, rope_angles

INF, NAN = float("inf"), float("nan")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def special_rows(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of random logits, ties at borders, both zeros, and what is no distribution."""
    generator = torch.Generator().manual_seed(vocab)
    rows = torch.randn(13, vocab, generator=generator) * 3
    rows[1] = rows[1].round().clamp(-1, 1)  # many ties
    rows[2] = rows[2].abs().neg()  # all negative
    rows[3] = -0.0
    rows[3, vocab // 2 :] = 0.0  # equal: the first is meant
    rows[4] = -5.0
    rows[4, [vocab // 3, vocab - 1]] = 2.0
    rows[5] = -INF
    rows[5, vocab - 1] = -torch.finfo(dtype).max
    rows[6] = -INF
    rows[7, vocab - 1] = NAN
    rows[8, 0] = -NAN
    rows[9, vocab // 2] = INF
    rows[10, ::2] = -INF
    rows[11, vocab // 2] = torch.finfo(dtype).max
    rows[12] = NAN
    return rows.to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *itertools.product([1, 5, 64, 777], DTYPES),
        *((vocab, torch.bfloat16) for vocab in (32000, 50257, 151936)),
    ],
)
def test_the_first_likeliest_token(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = special_rows(vocab, dtype).to(device)
    block = 64 if vocab < 1000 else 4096
    scratch = Scratch.empty(len(logits), vocab, logits.device, block)
    want = reference_argmax_rows(logits)
    assert want.tolist()[5:10] == [vocab - 1, -1, -1, -1, -1]
    copy = torch.zeros(20, vocab, dtype=dtype, device=device)
    for _ in range(2):  # the scratch is left as it was found
        got = argmax_rows(logits, scratch, None, copy[: len(logits)], block=block)
        assert torch.equal(got, want)
    assert torch.equal(copy[: len(logits)].nan_to_num(7.0), logits.nan_to_num(7.0))
    assert not copy[len(logits) :].any()
    assert not scratch.arrivals.any()


def test_rows_further_apart_and_tokens_in_place() -> None:
    logits = special_rows(90, torch.float32)[:, :70]
    tokens = torch.full((15,), 99)
    scratch = Scratch.empty(13, 70, logits.device, 16)
    assert argmax_rows(logits, scratch, tokens[1:14], block=16).data_ptr() == tokens[1:].data_ptr()
    assert torch.equal(tokens[1:14], reference_argmax_rows(logits))
    assert tokens[[0, 14]].tolist() == [99, 99]
    assert scratch.holds(13, 70, 16)
    assert not scratch.holds(14, 70, 16)
    assert not scratch.holds(13, 97, 16)


def plain_inputs(
    own: RowArrays, chosen: torch.Tensor, flat: RowArrays, tables: np.ndarray, size: int
) -> np.ndarray:
    """What decode_inputs does, row by row."""
    for name in ("positions", "cache_rows", "kv_lens", "slots"):
        getattr(flat, name)[:size] = getattr(own, name)[:size]
    flat.query_starts[: size + 1] = own.query_starts[: size + 1]
    tables[own.cells[:size]] = own.blocks[:size]
    known = np.concatenate([chosen.cpu().numpy(), own.token_ids])
    return np.maximum(known[own.sources[:size]], 0)


def views(array: np.ndarray, most: int) -> RowArrays:
    return RowArrays(*(array[start:end] for start, end in row_bounds(most)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "most"), [(1, 1), (1, 7), (5, 7), (128, 128), (1030, 1100)])
def test_inputs_of_a_decode_step(size: int, most: int, device: str) -> None:
    """Three places in turn, read in the host's own memory; the graph's rows are some of all."""
    rng = np.random.default_rng(size)
    width = 7
    given = torch.zeros(3, buffer_size(most), dtype=torch.int64, pin_memory=device == "cuda")
    turn = torch.full((1,), 4, dtype=torch.int64, device=device)
    chosen = torch.from_numpy(rng.integers(-1, 500, most)).to(device)
    flat = np.full(buffer_size(most), 77)
    tables = rng.integers(0, 900, (most + 1) * width)
    flat_there, tables_there = torch.tensor(flat).to(device), torch.tensor(tables).to(device)
    for place in (1, 2, 0, 1):
        own = views(given[place].numpy(), most)
        for array in own:
            array[:] = rng.integers(0, 999, len(array))
        own.cells[:] = np.arange(most) * width + rng.integers(0, width, most)
        own.sources[:] = rng.integers(0, 2 * most, most)
        want = plain_inputs(own, chosen, views(flat, most), tables, size)
        got = decode_inputs(given, turn, chosen, flat_there, tables_there, size)
        assert got.tolist() == want.tolist()
        assert flat_there.tolist() == flat.tolist()
        assert tables_there.tolist() == tables.tolist()
    assert turn.tolist() == [8]


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_are_told_to_the_host(device: str) -> None:
    logits = special_rows(70, torch.float32).to(device)
    scratch = Scratch.empty(13, 70, logits.device, 16)
    told = torch.full((3, 20), 77, pin_memory=device == "cuda")
    for turn in (5, 6):
        now = torch.tensor([turn], device=device)
        tokens = argmax_rows(logits, scratch, None, None, told, now, block=16)
        if device == "cuda":
            torch.cuda.synchronize()
        assert torch.equal(told[(turn - 1) % 3, :13], tokens.cpu())
    assert (told[:, 13:] == 77).all()
    assert (told[0] == 77).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("width", "form"), [(40, "rounded"), (256, "one_plus"), (1500, "plain")])
def test_head_of_a_step(width: int, form: str, dtype: torch.dtype, device: str) -> None:
    """What separate launches give, bit for bit but for the norm's sum."""
    generator = torch.Generator().manual_seed(width)
    table = torch.randn(30, width, generator=generator).to(device, dtype)
    weight = torch.randn(width, generator=generator).to(device, dtype)
    norm = Norm(None if form == "plain" else weight, width, 1e-5, form)
    tokens = torch.tensor([29, 0, 7, 7, 12], device=device)
    positions = torch.tensor([0, 3, 70, 4000, 1], device=device)
    frequencies = 10000.0 ** (-torch.arange(6, device=device) / 6)
    for layout in (None, *LAYOUTS):
        angles = None if layout is None else Angles(frequencies, 1.3, layout, dtype)
        got = embed(tokens, table, norm, None if angles is None else positions, angles)
        assert torch.equal(got.hidden, table[tokens])
        for want in (rms_norm(got.hidden, norm), reference_rms_norm(got.hidden, norm)):
            torch.testing.assert_close(got.normed, want)
        assert (got.angles is None) == (angles is None)
        if angles is not None and got.angles is not None:
            for part, want in zip(got.angles, rope_angles(positions, angles), strict=True):
                assert torch.equal(part, want)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 40, 700])
def test_changes_of_single_logits(count: int, device: str) -> None:
    """Bit for bit, so each step is rounded."""
    rng = np.random.default_rng(count)
    logits = special_rows(100, torch.float32)
    where = rng.permutation(logits.numel())[:count]
    changes = Changes(where // 100, where % 100, rng.uniform(0.3, 3, count), rng.normal(size=count))
    changes.shifts[::5] = INF
    want, got = logits.clone(), logits.to(device)
    reference_change_logits(want, *map(torch.from_numpy, changes))
    change_logits(got, changes.packed().to(device))
    assert torch.equal(got.cpu().nan_to_num(77.0), want.nan_to_num(77.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [5, 64, 777, 32001])
def test_masks_of_rows(vocab: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (3, words), generator=generator).to(torch.int32)
    logits = special_rows(vocab, torch.float32)
    rows = torch.tensor([11, 0, 7])
    want, got = logits.clone(), logits.to(device)
    reference_mask_rows(want, rows, mask)
    mask_rows(got, rows.to(device), mask.to(device), block=64 if vocab < 1000 else 4096)
    assert torch.equal(got.cpu().nan_to_num(77.0), want.nan_to_num(77.0))
