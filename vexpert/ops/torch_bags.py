"""Products with rows read where they lie: the two halves of LoRA on a CPU, without any gather.

dots:  h[i] = x[x_row[i]] . flat[offset[i] : offset[i] + width]        (rows of A: the shrink)
sums:  y[b] = sum over i of bag b: h[i] * flat[offset[i] : ... + width] (rows of B^T: the expand)

Both are kernels of torch's embedding bag; they accumulate in float32 also for half dtypes
(measured: the error is that of rounding the result). One (pair, rank) of width 256 takes about
25 ns; gathering the factors and multiplying them takes ten times that.
"""

import torch

from vexpert.ops.torch_routing import IntArray

_SUM = 0  # embedding bag's mode
_NO_PADDING = -1


def dots(
    x: torch.Tensor, flat: torch.Tensor, width: int, offset: IntArray, x_row: IntArray
) -> torch.Tensor:
    """h [n] in the dtype of x [R, width] and flat [N]; offset and x_row are [n]."""
    # Rows may start at any element, so the view overlaps itself; this kernel follows strides.
    rows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
    index = torch.from_numpy(offset)
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(  # type: ignore[no-any-return]
        x.contiguous(), rows, index, index, torch.from_numpy(x_row), _SUM, _NO_PADDING
    )


def sums(
    h: torch.Tensor, flat: torch.Tensor, width: int, offset: IntArray, bag_start: IntArray
) -> torch.Tensor:
    """y [bags, width] in the dtype of h [n] and flat [N]; bag_start is [bags].

    All of `offset` [n] must be equal modulo `width`: this kernel would copy an overlapping view.
    """
    shift = int(offset[0]) % width
    count = (flat.numel() - shift) // width
    rows = flat.narrow(0, shift, count * width).view(count, width)
    index = torch.from_numpy((offset - shift) // width)
    return torch.embedding_bag(rows, index, torch.from_numpy(bag_start), False, _SUM, False, h)[0]
