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


def rows_anywhere(flat: torch.Tensor, width: int) -> torch.Tensor:
    """Row i is flat[i : i + width]. For `weighted_dots` alone, which follows strides."""
    return flat.as_strided((flat.numel() - width + 1, width), (1, 1))


def rows_in_step(flat: torch.Tensor, width: int, shift: int) -> torch.Tensor:
    """Row i is flat[shift + i * width : ... + width]."""
    count = (flat.numel() - shift) // width
    return flat.narrow(0, shift, count * width).view(count, width)


def weighted_dots(
    x: torch.Tensor, rows: torch.Tensor, index: IntArray, x_row: IntArray
) -> torch.Tensor:
    """h[i] = x[x_row[i]] . rows[index[i]], [n] in the dtype of x [R, width]."""
    place = torch.from_numpy(index)
    dots: torch.Tensor = torch.ops.aten._embedding_bag_per_sample_weights_backward(
        x.contiguous(), rows, place, place, torch.from_numpy(x_row), _SUM, _NO_PADDING
    )
    return dots


def weighted_sums(
    h: torch.Tensor | None, rows: torch.Tensor, index: IntArray, bag_start: IntArray
) -> torch.Tensor:
    """y[b] = sum over i of bag b of h[i] * rows[index[i]], in order; h None: ones.

    `rows` must be contiguous: this kernel would copy a view that overlaps itself.
    """
    return torch.embedding_bag(
        rows, torch.from_numpy(index), torch.from_numpy(bag_start), False, _SUM, False, h
    )[0]


def dots(
    x: torch.Tensor, flat: torch.Tensor, width: int, offset: IntArray, x_row: IntArray
) -> torch.Tensor:
    """h [n] for x [R, width], rows of flat [N] at `offset` [n], and x_row [n]."""
    return weighted_dots(x, rows_anywhere(flat, width), offset, x_row)


def sums(
    h: torch.Tensor, flat: torch.Tensor, width: int, offset: IntArray, bag_start: IntArray
) -> torch.Tensor:
    """y [bags, width] for h [n], rows of flat [N] at `offset` [n], all equal modulo `width`."""
    shift = int(offset[0]) % width
    return weighted_sums(h, rows_in_step(flat, width, shift), (offset - shift) // width, bag_start)
