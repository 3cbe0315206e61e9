"""The backend for CPUs: torch and numpy alone."""

import torch

from vexpert.kernels.dense_factors import DenseDelta, HeadColumns
from vexpert.ops import per_adapter, torch_gemm, torch_heads, torch_routing
from vexpert.ops.backend import check_operands
from vexpert.ops.float32_linear import linear
from vexpert.ops.routing import Arrangement, Routing
from vexpert.ops.torch_lora import Delta
from vexpert.ops.torch_routing import IntArray, TorchArrangement, TorchRouting, ragged
from vexpert.ops.torch_table import HostTable
from vexpert.ops.types import ExpertsTensors, LoraSite, PackedLora, SiteTable


class TorchBackend:
    """Implements `LoraBackend`; half dtypes accumulate in float32."""

    name = "torch"
    can_fuse = False
    can_pack = False

    def __init__(self) -> None:
        self._host_tables: dict[int, HostTable] = {}

    def _host(self, site: LoraSite, table: SiteTable) -> HostTable:
        host = self._host_tables.get(site.index)
        if host is None or host.table is not table:
            host = self._host_tables[site.index] = HostTable(site, table)
        return host

    def route(
        self, slots: torch.Tensor, experts: torch.Tensor | None, num_experts: int, num_slots: int
    ) -> TorchRouting:
        return torch_routing.route(slots, experts, num_experts)

    def apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> None:
        assert isinstance(routing, TorchRouting)
        check_operands(self.name, x, y, site, table, routing.num_rows)
        self._apply(x, y, site, table, routing, x_rows)

    def _apply(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: TorchRouting,
        x_rows: torch.Tensor | None,
    ) -> None:
        """`apply` of operands that fit."""
        if len(routing.pairs.rows):
            Delta(x, site, self._host(site, table), x_rows).add(y, routing)

    def shrink(
        self,
        x: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        x_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(routing, TorchRouting)
        host = self._host(site, table)
        h = torch.zeros(routing.num_rows, site.max_rank)
        values, _ = Delta(x, site, host, x_rows).shrink(routing.pairs)
        pair, column, _ = ragged(host.rank[routing.pairs.slots])
        place = routing.pairs.rows[pair] * site.max_rank + column
        h.view(-1)[torch.from_numpy(place)] = values.to(torch.float32)
        return h

    def expand(
        self,
        h: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        routing: Routing,
        y: torch.Tensor,
        fuse_add_to_output: bool = True,
        add_output_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(routing, TorchRouting)
        pairs = routing.pairs
        if add_output_mask is not None:
            pairs = pairs.take(add_output_mask.numpy()[pairs.rows])
        out = y if fuse_add_to_output else torch.zeros_like(y)
        flat = h.to(table.arena.dtype).reshape(-1)
        starts: IntArray = pairs.rows * h.shape[1]
        Delta(y, site, self._host(site, table), None).expand(out, pairs, flat, starts)
        return out

    def apply_per_adapter(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        site: LoraSite,
        table: SiteTable,
        slots: torch.Tensor,
        experts: torch.Tensor | None,
        active_slots: tuple[int, ...],
        x_rows: torch.Tensor | None = None,
    ) -> None:
        check_operands(self.name, x, y, site, table, slots.shape[0])
        per_adapter.apply_per_adapter(x, y, site, table, slots, experts, active_slots, x_rows)

    def packed_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora | None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Site by site: LoRA adds to contiguous outputs faster than to slices."""
        if lora is None:
            return linear(x, weight, bias, out_dtype)
        sizes = [site.out_features for site in lora.sites]
        weights = torch.split(weight, sizes)
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        parts = []
        for site, table, own, its_bias in zip(
            lora.sites, lora.tables, weights, biases, strict=True
        ):
            y = linear(x, own, its_bias, out_dtype)
            self.apply(x, y, site, table, lora.routing)
            parts.append(y)
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0]

    def deferred_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        lora: PackedLora,
        tiles: bool = False,
    ) -> tuple[torch.Tensor, DenseDelta | None]:
        return self.packed_linear(x, weight, bias, lora), None

    def add_by_head(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        lora: PackedLora,
        columns: HeadColumns,
        of_keys: bool,
    ) -> None:
        assert isinstance(lora.routing, TorchRouting)
        torch_heads.add_by_head(x, y, lora, lora.routing, columns, of_keys)

    def fuse_experts(self, experts: ExpertsTensors) -> None:
        """Step by step: the products are PyTorch's."""

    def prepare_weight(self, weight: torch.Tensor, is_transposed: bool) -> None:
        torch_gemm.store_input_major(weight, is_transposed)

    def arrange(self, topk_ids: torch.Tensor, num_experts: int) -> TorchArrangement:
        return torch_routing.arrange(topk_ids, num_experts)

    def grouped_gemm(
        self,
        x: torch.Tensor,
        x_rows: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        arrangement: Arrangement,
        is_transposed: bool,
    ) -> torch.Tensor:
        assert isinstance(arrangement, TorchArrangement)
        return torch_gemm.grouped_gemm(x, x_rows, weight, bias, arrangement, is_transposed)

    def combine(
        self, y: torch.Tensor, weights: torch.Tensor | None, arrangement: Arrangement
    ) -> torch.Tensor:
        assert isinstance(arrangement, TorchArrangement)
        return torch_gemm.combine(y, weights, arrangement)
