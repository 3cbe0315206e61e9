"""One adapter as one contiguous host buffer, laid out as the device arena will hold it.

Formula: slice i of a site adds `scale * B_i @ A_i @ x`. A is stored as [E or 1, R, in], R being the
rows of all distinct A of the site; B as its transpose [E or 1, r, size] with the scale inside.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm

import torch

from vexpert.errors import AdapterError
from vexpert.lora.cells import Cells, entry_cells
from vexpert.lora.parallel import run_all
from vexpert.lora.site_extras import (
    ALIGN_BYTES,
    ExtraEntry,
    SiteExtra,
    plan_extras,
    write_extras,
)
from vexpert.lora.types import (
    AdapterWeights,
    EmbeddingTarget,
    ExpertsFactors,
    ExpertsTarget,
    Factors,
    LinearTarget,
    PerExpertFactors,
    Target,
    TargetMap,
)
from vexpert.ops.types import LoraSite

MAX_START_ALIGNMENT = 1 << 18  # elements: at most 1 MiB of padding for an adapter of many MiB

TASK_ELEMENTS = 1 << 19  # of one call of a packing thread

Allocate = Callable[[int], torch.Tensor]  # elements -> a host buffer of that size


def align_up(size: int, alignment: int) -> int:
    """Smallest multiple of `alignment` that is at least `size`."""
    return -(-size // alignment) * alignment


def factor_alignment(dtype: torch.dtype) -> int:
    """Elements that the start of every factor is a multiple of, in the buffer and in the arena."""
    return max(1, ALIGN_BYTES // dtype.itemsize)


@dataclass(frozen=True)
class SiteEntry:
    """One adapter's factors of one site: offsets and strides in elements, from the buffer's start.

    A stride of 0 is a factor shared by all experts; the tuples have one item per output slice.
    """

    site: int
    rank: int  # rows of A
    a_offset: int
    a_stride: int
    slice_rank: tuple[int, ...]  # 0: this slice is not adapted
    slice_column: tuple[int, ...]
    b_offset: tuple[int, ...]
    b_stride: tuple[int, ...]


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter ready for the arena. Immutable."""

    buffer: torch.Tensor  # [N] on the host, in the arena's dtype
    entries: tuple[SiteEntry, ...]  # one per adapted site, by site index
    cells: Cells  # the same for the tables: made by who packs, and not between two steps
    rank: int  # largest rank of a single factor
    extras: tuple[ExtraEntry, ...] = ()  # behind all factors

    @property
    def nbytes(self) -> int:
        return self.buffer.numel() * self.buffer.element_size()


Rows = torch.Tensor | tuple[torch.Tensor, ...]  # [E or 1, r, width], or for each expert [r, width]


def _shape(rows: Rows) -> tuple[int, int, int]:
    if isinstance(rows, torch.Tensor):
        return rows.shape[0], rows.shape[1], rows.shape[2]
    return len(rows), rows[0].shape[0], rows[0].shape[1]


def _rows_of_a(part: Factors) -> Rows:
    return part.a_parts if isinstance(part, PerExpertFactors) else part.a


def _rows_of_b(part: Factors) -> Rows:
    if isinstance(part, PerExpertFactors):
        return tuple(b.t() for b in part.b_parts)
    return part.b.transpose(1, 2)


def _shape_of_b(part: Factors) -> tuple[int, int, int]:
    """Of B^T, without making it."""
    if isinstance(part, PerExpertFactors):
        return len(part.b_parts), part.rank, part.b_parts[0].shape[0]
    return part.b.shape[0], part.b.shape[2], part.b.shape[1]


def _rows_together(source: torch.Tensor) -> torch.Tensor | None:
    """The same [E, r, width] reordered, if experts vary fastest in memory, as B's do in a file.

    A plain transpose of a matrix and a copy of whole rows: 8 times as fast as one 3-D copy.
    """
    experts, rank, width = source.shape
    by_width = source.permute(2, 1, 0)
    if experts == 1 or not by_width.is_contiguous():
        return None
    matrix = by_width.reshape(width, rank * experts).t().contiguous()
    return matrix.view(rank, experts, width).transpose(0, 1)


def _write(place: torch.Tensor, sources: Sequence[torch.Tensor], scale: float) -> None:
    """Copy each [r, width] to its row of `place` [n, r, width], scaled in float32, then rounded.

    Transposed sources take PyTorch's blocked copy, which needs matrices of one dtype. One call for
    all: threads that come back for the interpreter's lock after each are no faster than one.
    """
    if sources[0].dtype == place.dtype or scale == 1.0:
        rows = list(place.unbind(0))
        torch._foreach_copy_(rows, list(sources))
        if scale == 1.0:
            return
        if float(torch.tensor(scale, dtype=place.dtype)) == scale:  # it rounds the scale first
            torch._foreach_mul_(rows, scale)
            return
        for row in rows:
            row.mul_(scale)
        return
    for row, source in zip(place, sources, strict=True):
        row.copy_(source.to(torch.float32) * scale)


@dataclass(frozen=True)
class _Piece:
    """A part of a region and what to write there."""

    offset: int
    shape: tuple[int, int, int]
    strides: tuple[int, int, int]
    source: Rows  # a leading 1 is for all experts
    scale: float

    def tasks(self, region: torch.Tensor) -> list[Callable[[], None]]:
        """Calls that together write it, about TASK_ELEMENTS each."""
        place = region.as_strided(self.shape, self.strides, region.storage_offset() + self.offset)
        source = self.source
        if isinstance(source, torch.Tensor):
            together = _rows_together(source)
            source = source if together is None else together
        experts = self.shape[0]
        step = max(1, TASK_ELEMENTS // (self.shape[1] * self.shape[2]))
        starts = range(0, experts, step)
        return [partial(self._write, place, source, at, min(at + step, experts)) for at in starts]

    def _write(self, place: torch.Tensor, source: Rows, start: int, end: int) -> None:
        last = _shape(source)[0] - 1
        sources = [source[min(expert, last)] for expert in range(start, end)]
        _write(place[start:end], sources, self.scale)


@dataclass
class _Region:
    """Tensors one after another, each at a multiple of `alignment` elements."""

    alignment: int
    size: int = 0
    pieces: list[_Piece] = field(default_factory=list)
    gaps: list[tuple[int, int]] = field(default_factory=list)  # (start, end) of padding

    def rows(self, sources: list[Rows], scale: float = 1.0) -> tuple[int, int]:
        """Place [L, r_i, width] tensors as one [E or 1, sum r_i, width]; its offset and stride."""
        shapes = [_shape(source) for source in sources]
        leading = max(shape[0] for shape in shapes)
        total, width = sum(shape[1] for shape in shapes), shapes[0][2]
        expert = total * width
        offset = position = self.size
        end = offset + leading * expert
        self.size = align_up(end, self.alignment)
        self.gaps.append((end, self.size))
        for source, (experts, rank, columns) in zip(sources, shapes, strict=True):
            assert experts in (1, leading), shapes
            assert columns == width, shapes
            shape = (leading, rank, width)
            self.pieces.append(_Piece(position, shape, (expert, width, 1), source, scale))
            position += rank * width
        return offset, expert if leading > 1 else 0


class _Plan:
    """Where everything goes: first every A, then B^T by the size of its rows.

    A B^T starts at a multiple of its row size: a CPU then reads its rows where they lie, as rows
    of one matrix. Neighbours of equal size need no padding for that.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.unit = max(1, ALIGN_BYTES // dtype.itemsize)
        self.a = _Region(self.unit)
        self.b: dict[int, _Region] = {}
        self.entries: list[SiteEntry] = []

    def place_a(self, sources: list[Rows]) -> tuple[int, int]:
        return self.a.rows(sources)

    def place_b(self, factors: Factors) -> tuple[int, int]:
        """Offset within the region of this row size, and stride."""
        rows = _rows_of_b(factors)
        size = _shape(rows)[2]
        region = self.b.setdefault(size, _Region(lcm(size, self.unit)))
        return region.rows([rows], factors.scale)

    def bases(self) -> tuple[dict[int, int], int]:
        """First element of each B region by row size, and the elements of the whole buffer."""
        position, bases = self.a.size, {}
        for size, region in sorted(self.b.items(), reverse=True):
            bases[size] = align_up(position, region.alignment)
            position = bases[size] + region.size
        return bases, position

    def finish(
        self, targets: TargetMap, extras: Mapping[int, SiteExtra], allocate: Allocate
    ) -> PackedAdapter:
        bases, total = self.bases()
        tail, end = plan_extras(extras, total, self.dtype)
        buffer = allocate(end)
        assert buffer.shape == (end,), (buffer.shape, end)
        assert buffer.dtype == self.dtype, buffer.dtype
        tasks: list[Callable[[], None]] = []
        edge = self.a.size  # what lies between two regions is padding too
        for start, region in [(0, self.a), *sorted((bases[n], r) for n, r in self.b.items())]:
            buffer[edge:start].zero_()
            for gap, stop in region.gaps:
                buffer[start + gap : start + stop].zero_()
            for piece in region.pieces:
                tasks += piece.tasks(buffer[start:])
            edge = start + region.size
        buffer[total:].zero_()
        with torch.no_grad():
            run_all(tasks)
        moved = []
        for entry in sorted(self.entries, key=lambda entry: entry.site):
            starts = [bases.get(output.size, 0) for output in targets.sites[entry.site].slices]
            offsets = tuple(o + s for o, s in zip(entry.b_offset, starts, strict=True))
            moved.append(replace(entry, b_offset=offsets))
        rank = max((r for entry in moved for r in entry.slice_rank), default=0)
        write_extras(buffer, tail, extras)
        entries = tuple(moved)
        return PackedAdapter(buffer, entries, entry_cells(entries), rank, tail)


def _place_linear(plan: _Plan, site: LoraSite, factors: Factors) -> SiteEntry:
    rank = factors.rank
    assert len(site.slices) == 1, site.name
    assert factors.a.shape == (1, rank, site.in_features), (site.name, factors.a.shape)
    assert factors.b.shape == (1, site.out_features, rank), (site.name, factors.b.shape)
    a_offset, _ = plan.place_a([factors.a])
    b_offset, _ = plan.place_b(factors)
    return SiteEntry(site.index, rank, a_offset, 0, (rank,), (0,), (b_offset,), (0,))


def _place_embedding(plan: _Plan, site: LoraSite, factors: Factors) -> SiteEntry:
    rank = factors.rank
    assert factors.a.shape == (1, rank, site.num_experts), (site.name, factors.a.shape)
    assert factors.b.shape == (1, site.out_features, rank), (site.name, factors.b.shape)
    a_offset, a_stride = plan.place_a([factors.a[0].t().unsqueeze(2)])
    b_offset, _ = plan.place_b(factors)
    return SiteEntry(site.index, rank, a_offset, a_stride, (rank,), (0,), (b_offset,), (0,))


def _place_experts(plan: _Plan, site: LoraSite, parts: list[Factors | None]) -> SiteEntry | None:
    """One part per output slice of `site`; parts with one common `a` object store it once."""
    sources: list[Rows] = []
    columns: dict[int, int] = {}
    rank = 0
    for part in parts:
        if part is not None and id(_rows_of_a(part)) not in columns:
            columns[id(_rows_of_a(part))] = rank
            sources.append(_rows_of_a(part))
            rank += part.rank
    if not sources:
        return None
    a_offset, a_stride = plan.place_a(sources)
    blank = (0, 0)
    placed = [blank if part is None else plan.place_b(part) for part in parts]
    return SiteEntry(
        site.index,
        rank,
        a_offset,
        a_stride,
        tuple(0 if part is None else part.rank for part in parts),
        tuple(0 if part is None else columns[id(_rows_of_a(part))] for part in parts),
        tuple(offset for offset, _ in placed),
        tuple(stride for _, stride in placed),
    )


def _check_experts(site: LoraSite, parts: list[Factors | None]) -> None:
    assert len(parts) == len(site.slices), (site.name, len(parts))
    for part, output in zip(parts, site.slices, strict=True):
        if part is not None:
            a, b = _shape(_rows_of_a(part)), _shape_of_b(part)
            assert {a[0], b[0]} <= {1, site.num_experts}, (site.name, a, b)
            assert a[1:] == (part.rank, site.in_features), (site.name, a)
            assert b[1:] == (part.rank, output.size), (site.name, b)


def _place(plan: _Plan, target: Target, factors: Factors | ExpertsFactors) -> list[SiteEntry]:
    if isinstance(target, ExpertsTarget):
        assert isinstance(factors, ExpertsFactors), target.path
        assert target.has_gate or factors.gate is None, target.path
        gate_up = [factors.gate, factors.up] if target.has_gate else [factors.up]
        products = [(target.gate_up, gate_up), (target.down, [factors.down])]
        for site, parts in products:
            _check_experts(site, parts)
        entries = [_place_experts(plan, site, parts) for site, parts in products]
        return [entry for entry in entries if entry is not None]
    assert isinstance(factors, Factors), target.path
    if isinstance(target, EmbeddingTarget):
        return [_place_embedding(plan, target.site, factors)]
    assert isinstance(target, LinearTarget), target.path
    return [_place_linear(plan, target.site, factors)]


def _check_finite(weights: AdapterWeights, buffer: torch.Tensor) -> None:
    """float16 alone can overflow where the file's own dtype does not."""
    if buffer.dtype != torch.float16 or bool(torch.isfinite(buffer).all()):
        return
    name, value, scale = max(_largest(weights), key=lambda one: abs(one[1] * one[2]))
    times = "" if scale == 1.0 else f" times the scale {scale:g}"
    raise AdapterError(
        f"{name} holds {value:g}{times}, beyond float16's range (65504); serve with dtype bfloat16 "
        "or float32"
    )


def _largest(weights: AdapterWeights) -> Iterable[tuple[str, float, float]]:
    """(name, largest magnitude, scale that packing applies) of every factor."""
    for path, module in weights.modules.items():
        parts = {"": module} if isinstance(module, Factors) else vars(module)
        for name, pair in parts.items():
            if pair is not None:
                where = f"{path}.{name}".rstrip(".")
                yield f"{where}.lora_A", float(pair.a.abs().max()), 1.0
                yield f"{where}.lora_B", float(pair.b.abs().max()), pair.scale


def _plan(weights: AdapterWeights, targets: TargetMap, dtype: torch.dtype) -> _Plan:
    plan = _Plan(dtype)
    for path, factors in weights.modules.items():
        plan.entries += _place(plan, targets.targets[path], factors)
    for entry in plan.entries:
        site = targets.sites[entry.site]
        assert 0 < entry.rank <= site.max_rank, (site.name, entry.rank, site.max_rank)
    return plan


def packed_elements(weights: AdapterWeights, targets: TargetMap, dtype: torch.dtype) -> int:
    """Elements of the buffer that `pack` would make; the tensors may be on the meta device."""
    return _plan(weights, targets, dtype).bases()[1]


def pack(
    weights: AdapterWeights,
    targets: TargetMap,
    dtype: torch.dtype,
    pin_memory: bool = False,
    extras: Mapping[int, SiteExtra] | None = None,
    allocate: Allocate | None = None,
) -> PackedAdapter:
    """Lay out `weights` for the arena of a model with `targets`; every tensor starts at 16 bytes.

    `extras` by site index, as `build_extras` made them of the same weights. `allocate` gives the
    buffer [N] in `dtype`, whose contents do not matter; without it the buffer is new memory, pinned
    if `pin_memory`.

    Raises AdapterError when a value does not fit `dtype`. Shapes are the reader's duty: asserted.
    """
    assert extras or not weights.extras, f"nothing applies {sorted(weights.extras)}"

    def new(size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=pin_memory)

    plan = _plan(weights, targets, dtype)
    packed = plan.finish(targets, extras or {}, allocate or new)
    _check_finite(weights, packed.buffer[: plan.bases()[1]])
    return packed


def start_alignment(targets: TargetMap, device: torch.device, dtype: torch.dtype) -> int:
    """Elements at whose multiples an adapter starts in the arena.

    On a CPU, a multiple of B^T's row sizes (vocabularies aside), so that the rows of all adapters
    line up and one call reads them all; a GPU reads any row, and takes the memory instead.
    """
    unit = max(1, ALIGN_BYTES // dtype.itemsize)
    if device.type == "cpu":
        for size in sorted({output.size for site in targets.sites for output in site.slices}):
            common = lcm(unit, size)
            unit = common if common <= MAX_START_ALIGNMENT else unit
    return unit
