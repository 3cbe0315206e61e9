"""Changes of logits before a token is chosen, in place; each is rounded as PyTorch rounds it.

`change_logits`, for each entry i; no two entries name the same logit:
  v = logits[row, token];  logits[row, token] = (v / factor if v > 0 else v * factor) - shift
`mask_rows`, for each row j of the mask:
  logits[rows[j], t] = -inf where bit t % 32 of mask[j, t / 32] is 0

| array | shape | holds |
|---|---|---|
| logits | [n, V] float32 | columns adjacent |
| entries | [3, m] int64 | row; token; factor and shift, the bits of two float32 |
| rows | [k] int64 | |
| mask | [k, ceil(V / 32)] int32 | contiguous |
"""

import torch
import triton
import triton.language as tl

from vexpert.kernels.common import ceil_div, check_matrix
from vexpert.kernels.launch import direct_launch

BLOCK = 256  # entries of a program
BLOCK_V = 4096  # logits of a program


@direct_launch
@triton.jit(do_not_specialize=["count"])
def _change_kernel(logits, rows, tokens, amounts, count, stride, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    row = tl.load(rows + i, mask=inside, other=0)
    at = logits + row * stride + tl.load(tokens + i, mask=inside, other=0)
    factor = tl.load(amounts + 2 * i, mask=inside, other=1.0)
    shift = tl.load(amounts + 2 * i + 1, mask=inside, other=0.0)
    v = tl.load(at, mask=inside, other=0.0)
    v = tl.where(v > 0, tl.math.div_rn(v, factor), v * factor)
    tl.store(at, v - shift, mask=inside)


def change_logits(logits: torch.Tensor, entries: torch.Tensor) -> None:
    """Change `logits` [n, V] float32 in place at `entries` [3, m] int64.

    No launch if m is 0. Reference: `reference_change_logits`.
    """
    check_matrix("logits", logits)
    assert logits.dtype == torch.float32, logits.dtype
    assert entries.shape[0] == 3, entries.shape
    assert entries.dtype == torch.int64, entries.dtype
    assert entries.is_contiguous(), entries.stride()
    rows, tokens, amounts = entries
    count = rows.shape[0]
    if count:
        _change_kernel[(ceil_div(count, BLOCK),)](
            logits,
            rows,
            tokens,
            amounts.view(torch.float32),
            count,
            logits.stride(0),
            BLOCK=BLOCK,
            enable_fp_fusion=False,  # the product is rounded before the shift
        )


def reference_change_logits(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tokens: torch.Tensor,
    factors: torch.Tensor,
    shifts: torch.Tensor,
) -> None:
    """The same in PyTorch, of entries that are not packed."""
    factor, shift = factors.float(), shifts.float()
    v = logits[rows, tokens]
    logits[rows, tokens] = torch.where(v > 0, v / factor, v * factor) - shift


@direct_launch
@triton.jit
def _mask_kernel(
    logits, rows, mask, stride, VOCAB: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):
    j = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < VOCAB
    word = tl.load(mask + j * WORDS + at // 32, mask=inside, other=0)
    is_forbidden = ((word >> (at % 32)) & 1) == 0
    row = logits + tl.load(rows + j) * stride
    tl.store(row + at, float("-inf"), mask=inside & is_forbidden)


def mask_rows(
    logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, block: int = BLOCK_V
) -> None:
    """Change `rows` [k] int64 of `logits` [n, V] float32 in place, by `mask` [k, words] int32.

    `block`: logits of a program. No launch if k is 0. Reference: `reference_mask_rows`.
    """
    check_matrix("logits", logits)
    count, vocab = rows.shape[0], logits.shape[1]
    words = ceil_div(vocab, 32)
    assert mask.shape == (count, words), (mask.shape, count, words)
    assert mask.dtype == torch.int32, mask.dtype
    assert mask.is_contiguous(), mask.stride()
    if count:
        _mask_kernel[(count, ceil_div(vocab, block))](
            logits, rows, mask, logits.stride(0), VOCAB=vocab, WORDS=words, BLOCK=block
        )


def reference_mask_rows(logits: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> None:
    """The same bit by bit."""
    for row, words in zip(rows.tolist(), mask.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not words[token // 32] >> token % 32 & 1:
                logits[row, token] = float("-inf")
