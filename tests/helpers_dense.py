"""Random packed dense layers, all sites in one arena with evenly spaced tables, as the pool has."""

from dataclasses import dataclass

import torch
from helpers_lora import SlotSpec, make_site, make_table

from vexpert.ops.backend import select_backend
from vexpert.ops.reference import packed_linear
from vexpert.ops.types import LoraSite, PackedLora, SiteTable


@dataclass(frozen=True)
class Packed:
    """One layer and one step."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    slots: torch.Tensor
    sites: tuple[LoraSite, ...]
    tables: tuple[SiteTable, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(site.out_features for site in self.sites)

    @property
    def num_slots(self) -> int:
        return len(self.tables[0].host_rank)

    def lora(self) -> PackedLora:
        backend = select_backend("triton", self.x.device, torch.float32)
        routing = backend.route(self.slots, None, 1, self.num_slots)
        return PackedLora(self.sites, self.tables, routing, tuple(range(self.num_slots)))

    def reference(self, with_lora: bool) -> torch.Tensor:
        slots = self.slots if with_lora else torch.full_like(self.slots, -1)
        return packed_linear(self.x, self.weight, self.bias, self.sites, self.tables, slots)


def make_packed(
    rows: int,
    depth: int = 48,
    sizes: tuple[int, ...] = (64, 16, 48),
    max_rank: int = 16,
    bias: bool = False,
    base_share: float = 0.3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    spread: bool = False,
    num_slots: int = 6,
    align: int = 1,
) -> Packed:
    """Slots of mixed ranks up to `max_rank`, some sites missing; x's rows apart if `spread`."""
    torch.manual_seed(rows + max_rank)
    ranks = [max_rank, 1, 0, max(1, max_rank // 2), max_rank, 3]
    sites, packs, arenas, host, start = [], [], [], [], 0
    for index, size in enumerate(sizes):
        site = make_site(1, depth, size, max_rank, index=index)
        # Another rotation of the ranks at each site: sites missing in other slots.
        specs = [SlotSpec((ranks[(slot + index) % 6],)) for slot in range(num_slots)]
        table = make_table(site, specs, dtype, device, seed=index, align=align)
        packed = table.packed.clone()
        for row in (1, 5):
            packed[row] += torch.where(packed[0] > 0, start, 0)
        arena = table.arena[: table.arena.numel() // align * align]
        sites.append(site)
        packs.append(packed)
        arenas.append(arena)
        host.append(table.host_rank)
        start += arena.numel()
    both, arena = torch.cat(packs), torch.cat(arenas)
    tables = tuple(
        SiteTable(arena, both[7 * i : 7 * i + 7], host[i], align) for i in range(len(sizes))
    )
    slots = torch.randint(0, num_slots, (rows,))
    slots[torch.rand(rows) < base_share] = -1
    x = torch.randn(rows, 2 * depth if spread else depth).to(device, dtype)[:, :depth]
    weight = (torch.randn(sum(sizes), depth) * depth**-0.5).to(device, dtype)
    given = torch.randn(sum(sizes)).to(device, dtype) if bias else None
    return Packed(x, weight, given, slots.to(device), tuple(sites), tables)
