"""A decode step's inputs, from what the host wrote and the step before left, in one launch.

The host writes each step's rows to one of some places in its own memory, in turn; the device reads
them there itself, and counts the turns. With `own` = given[turn mod P]:
  flat[field, r]               = own[field, r]      all fields but those of this launch
  tables[own.cells[r]]         = own.blocks[r]
  tokens[r]                    = max(known[own.sources[r]], 0)
`known` is `chosen` and own.token_ids end to end; -1, no token, becomes any: its sequence ends.

| array | shape | holds |
|---|---|---|
| given | [P, F] int64 | pinned on the host; F elements as `RowArrays` has them, of M rows |
| turn | [1] int64 | one more after the launch |
| chosen | [M] int64 | tokens of the step before |
| flat | [F] int64 | |
| tables | [cells] int64 | of several rows that name one cell, any wins |
| tokens | [R] int64 | R of the M rows |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import pdl_options, pdl_release, pdl_wait, power_of_two
from vexpert.kernels.launch import direct_launch

FIELDS = 9  # each of M elements; the sixth, query_starts, of M + 1
MOST_ROWS = 1024  # at once; one program takes them all, so that it can count


@direct_launch
@triton.jit(do_not_specialize=["num_rows"])
def _decode_inputs_kernel(
    given,
    turn,
    chosen,
    flat,
    tables,
    tokens,
    num_rows,
    M: tl.constexpr,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_release(PDL)
    pdl_wait(PDL)
    now = tl.load(turn)
    given += (now % PLACES) * (9 * M + 1)
    for start in range(0, num_rows + 1, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < num_rows
        # Once across the bus: all loads but that of a token from the host are under way together.
        source = tl.load(given + 8 * M + 1 + row, mask=inside, other=0)
        cell = tl.load(given + 6 * M + 1 + row, mask=inside, other=0)
        block = tl.load(given + 7 * M + 1 + row, mask=inside, other=0)
        position = tl.load(given + M + row, mask=inside, other=0)
        cache_row = tl.load(given + 2 * M + row, mask=inside, other=0)
        kv_len = tl.load(given + 3 * M + row, mask=inside, other=0)
        slot = tl.load(given + 4 * M + row, mask=inside, other=0)
        query_start = tl.load(given + 5 * M + row, mask=row <= num_rows, other=0)
        tl.store(flat + M + row, position, mask=inside)
        tl.store(flat + 2 * M + row, cache_row, mask=inside)
        tl.store(flat + 3 * M + row, kv_len, mask=inside)
        tl.store(flat + 4 * M + row, slot, mask=inside)
        tl.store(flat + 5 * M + row, query_start, mask=row <= num_rows)
        tl.store(tables + cell, block, mask=inside)
        is_known = source >= M
        told = tl.load(given + (source - M), mask=inside & is_known, other=0)
        token = tl.load(chosen + source, mask=inside & (source < M), other=0)
        tl.store(tokens + row, tl.maximum(tl.where(is_known, told, token), 0), mask=inside)
    tl.debug_barrier()  # every thread has read the turn
    tl.store(turn, now + 1)


def decode_inputs(
    given: torch.Tensor,
    turn: torch.Tensor,
    chosen: torch.Tensor,
    flat: torch.Tensor,
    tables: torch.Tensor,
    size: int,
    pdl: bool = False,
) -> torch.Tensor:
    """`tokens` [size] int64; `flat`, `tables` and `turn` change in place.

    All contiguous; 0 < size <= M. Reference: `tests/test_kernels_decode.py: plain_inputs`.
    """
    most = chosen.shape[0]
    assert 0 < size <= most, (size, most)
    assert given.shape[1:] == flat.shape == (FIELDS * most + 1,), (given.shape, flat.shape, most)
    for array in (given, turn, chosen, flat, tables):
        assert array.dtype == torch.int64, array.dtype
        assert array.is_contiguous(), array.stride()
    tokens = torch.empty(size, dtype=torch.int64, device=flat.device)
    block = power_of_two(size + 1, 2, MOST_ROWS)
    _decode_inputs_kernel[(1,)](
        given,
        turn,
        chosen,
        flat,
        tables,
        tokens,
        size,
        M=most,
        PLACES=given.shape[0],
        BLOCK=block,
        num_warps=power_of_two(block // 32, 1, 8),
        **pdl_options(pdl),
    )
    return tokens
