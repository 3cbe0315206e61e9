"""A decode step's own inputs from what the host and the step before left, in one launch.

  tables[cells[r]] = blocks[r]
  tokens[r]        = max(known[sources[r]], 0)     -1, no token, becomes any: its sequence ends

| array | shape | holds |
|---|---|---|
| cells, blocks | [R] int64 | places in the flat tables, and the block ids that go there |
| tables | flat int64 | of several rows that name one cell, any wins |
| sources | [R] int64 | places in `known` |
| known | [K] int64 | tokens of the step before, then those that the host knows |
| tokens | [R] int64 | |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, pdl_options, pdl_release, pdl_wait, power_of_two

MOST_ROWS = 256  # of a program


@triton.jit(do_not_specialize=["num_rows"])
def _decode_inputs_kernel(
    cells,
    blocks,
    tables,
    sources,
    known,
    tokens,
    num_rows,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    pdl_release(PDL)
    pdl_wait(PDL)
    source = tl.load(sources + row, mask=inside, other=0)
    cell = tl.load(cells + row, mask=inside, other=0)
    tl.store(tables + cell, tl.load(blocks + row, mask=inside, other=0), mask=inside)
    token = tl.load(known + source, mask=inside, other=0)
    tl.store(tokens + row, tl.maximum(token, 0), mask=inside)


def decode_inputs(
    cells: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    sources: torch.Tensor,
    known: torch.Tensor,
    pdl: bool = False,
) -> torch.Tensor:
    """`tokens` [R]; `tables` changes in place."""
    rows = sources.shape[0]
    assert cells.shape == blocks.shape == (rows,), (cells.shape, blocks.shape, rows)
    for array in (cells, blocks, tables, sources, known):
        assert array.dtype == torch.int64, array.dtype
        assert array.is_contiguous(), array.stride()
    tokens = torch.empty_like(sources)
    block = power_of_two(rows, 1, MOST_ROWS)
    _decode_inputs_kernel[(ceil_div(rows, block),)](
        cells,
        blocks,
        tables,
        sources,
        known,
        tokens,
        rows,
        BLOCK=block,
        num_warps=power_of_two(block // 32, 1, 8),
        **pdl_options(pdl),
    )
    return tokens


def reference_decode_inputs(
    cells: torch.Tensor,
    blocks: torch.Tensor,
    tables: torch.Tensor,
    sources: torch.Tensor,
    known: torch.Tensor,
) -> torch.Tensor:
    """The same in PyTorch."""
    tables.view(-1).scatter_(0, cells, blocks)
    return known.index_select(0, sources).clamp(min=0)
