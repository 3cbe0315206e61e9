"""Figures of other systems and goals, shipped beside the code; their source is in the file."""

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vexpert.bench.cases import Case

FILE = "h200_qwen3_30b_a3b.csv"
SHAPE = "qwen3-30b-a3b"


@dataclass(frozen=True)
class Peer:
    """One row of the file; microseconds, one H200, bf16, uniform adapters and experts."""

    shape: str
    rank: int
    adapters: int
    tokens: int
    base_share: float
    vllm_base_us: float
    vllm_added_us: float
    sglang_added_us: float
    sglang_classic_added_us: float
    lora_floor_us: float
    goal_added_us: float | None

    def figures(self) -> dict[str, Any]:
        return {
            "vllm_base_us": self.vllm_base_us,
            "vllm_added_us": self.vllm_added_us,
            "sglang_added_us": self.sglang_added_us,
            "sglang_classic_added_us": self.sglang_classic_added_us,
            "goal_added_us": self.goal_added_us,
        }


@lru_cache(maxsize=1)
def load_peers() -> tuple[Peer, ...]:
    """Every row of the file."""
    text = resources.files("vexpert.bench").joinpath(FILE).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return tuple(_peer(row) for row in csv.DictReader(lines))


def _peer(row: dict[str, str]) -> Peer:
    goal = row["goal_added_us"]
    return Peer(
        SHAPE,
        int(row["rank"]),
        int(row["adapters"]),
        int(row["tokens"]),
        0.5 if row["half_base_rows"] == "1" else 0.0,
        float(row["base_vllm_us"]),
        float(row["vllm_added_us"]),
        float(row["sglang_virtual_added_us"]),
        float(row["sglang_classic_added_us"]),
        float(row["lora_floor_us"]),
        float(goal) if goal else None,
    )


def find_peer(case: "Case") -> Peer | None:
    """The row measured for the very same shape, rank, adapters, tokens, base share and draw."""
    if (case.popularity, case.expert_popularity, case.shared_a) != ("uniform", "uniform", False):
        return None
    if case.slots != case.adapters or case.adapter_rows_only:
        return None
    key = (case.shape, case.ranks, case.adapters, case.tokens, case.base_share)
    for peer in load_peers():
        if (peer.shape, (peer.rank,), peer.adapters, peer.tokens, peer.base_share) == key:
            return peer
    return None
