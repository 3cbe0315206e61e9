"""What a layer of routed experts depends on: the inputs and the key of its replays."""

from collections.abc import Hashable

import torch

from vexpert.kernels.replay import Replays
from vexpert.ops.types import ExpertsLora, ExpertsTensors, Finish, LoraSite, SiteTable

EXPERTS = Replays("routed experts")


def experts_inputs(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    experts: ExpertsTensors,
    lora: ExpertsLora | None,
    finish: Finish | None,
) -> list[torch.Tensor]:
    """All tensors that the layer reads, each once."""
    found: list[torch.Tensor | None] = [hidden, topk_ids, topk_weights]
    found += [experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias]
    if finish is not None:
        found.append(finish.residual)
        if finish.norm is not None:
            found.append(finish.norm.weight)
    if lora is not None:
        tables = [pair[1] for pair in (lora.gate_up, lora.down) if pair is not None]
        found += [lora.slots, tables[0].arena, *(table.packed for table in tables)]
        found += [table.arrivals for table in tables]
        if tables[-1].arena is not tables[0].arena:
            found.append(tables[-1].arena)
    return [tensor for tensor in found if tensor is not None]


def experts_key(
    experts: ExpertsTensors, lora: ExpertsLora | None, finish: Finish | None
) -> Hashable:
    """Everything besides tensors and the plan."""
    activation = experts.activation
    own = (
        activation.name,
        activation.alpha,
        activation.limit,
        experts.is_interleaved,
        experts.scale_input,
        experts.gate_up_bias is None,
        experts.down_bias is None,
    )
    return own, _lora_key(lora), _finish_key(finish)


def _lora_key(lora: ExpertsLora | None) -> Hashable:
    if lora is None:
        return None
    up = _site_key(lora.gate_up, lora.most_rank(is_down=False))
    return lora.num_adapters, up, _site_key(lora.down, lora.most_rank(is_down=True))


def _site_key(pair: tuple[LoraSite, SiteTable] | None, most_rank: int) -> Hashable:
    if pair is None:
        return None
    site, table = pair
    return site.max_rank, len(site.slices), most_rank, table.alignment


def _finish_key(finish: Finish | None) -> Hashable:
    if finish is None:
        return None
    norm = finish.norm
    if norm is None:
        return (finish.multiplier,)
    return finish.multiplier, norm.eps, norm.form, norm.width, norm.weight is None
