"""The cells as a table: base, LoRA, their ratio, what the floor of the bytes allows, and vLLM."""

from dataclasses import dataclass

from vexpert.bench.engine.cells import Cell, Timing

# One H200, vLLM 0.25.1, the same model, lengths and adapters (32 slots), 2026-11-29: tokens/s.
VLLM: dict[tuple[str, int, int], float] = {
    ("decode", 1, 0): 713, ("decode", 8, 0): 4456, ("decode", 32, 0): 11359,
    ("decode", 128, 0): 24573, ("decode", 1, 1): 517, ("decode", 8, 1): 2663,
    ("decode", 8, 8): 2487, ("decode", 32, 1): 8997, ("decode", 32, 8): 7634,
    ("decode", 32, 32): 6371, ("decode", 128, 1): 15962, ("decode", 128, 8): 14464,
    ("decode", 128, 32): 13448, ("prefill", 16, 0): 363092, ("prefill", 16, 1): 136700,
    ("prefill", 16, 8): 153127, ("prefill", 1, 0): 189006, ("prefill", 1, 1): 46273,
}  # fmt: skip


def is_peers_model(shape: str, rank: int) -> bool:
    """Whether vLLM's figures are of this model and rank."""
    return (shape, rank) == ("qwen3-30b-a3b-8l", 16)


@dataclass(frozen=True)
class Columns:
    """Which columns have figures for this model; the others are not printed."""

    has_floor: bool
    has_peer: bool

    def heading(self) -> str:
        words = f"{'cell':22}{'adapters':>9}{'tokens/s':>11}{'ms':>9}{'of base':>9}"
        words += f"{'floor':>7}" if self.has_floor else ""
        return words + (f"{'vLLM':>10}{'vLLM LoRA':>11}" if self.has_peer else "")


@dataclass(frozen=True)
class CellRow:
    """One line. `server`: "base" (LoRA off) or "lora"."""

    cell: Cell
    server: str
    timing: Timing
    base: Timing | None  # the same cell without adapters on the server with LoRA off, if timed
    floor: float | None  # the share of base that the bytes allow

    @property
    def ratio(self) -> float | None:
        return None if self.base is None else self.base.median / self.timing.median

    def line(self, columns: Columns) -> str:
        cell = self.cell
        adapters = str(cell.adapters) if self.server == "lora" else "off"
        parts = [f"{cell.kind} {cell.batch} x {cell.input_len}".ljust(22), f"{adapters:>9}"]
        parts.append(f"{self.timing.tokens_per_second(cell):>11.0f}")
        parts.append(f"{1e3 * self.timing.median:>9.3f}")
        parts.append(f"{self.ratio:>9.1%}" if self.ratio is not None else " " * 9)
        if columns.has_floor:
            parts.append(f"{self.floor:>7.0%}" if self.floor is not None else " " * 7)
        for count, width in ((0, 10), (cell.adapters, 11)) if columns.has_peer else ():
            figure = VLLM.get((cell.kind, cell.batch, count))
            parts.append(f"{figure:>{width}.0f}" if figure else " " * width)
        return "".join(parts).rstrip()

    def as_json(self) -> dict[str, object]:
        cell = self.cell
        return {
            "kind": cell.kind,
            "server": self.server,
            "batch": cell.batch,
            "input_len": cell.input_len,
            "adapters": cell.adapters,
            "tokens_per_second": round(self.timing.tokens_per_second(cell), 1),
            "ms": round(1e3 * self.timing.median, 4),
            "ms_rounds": [round(1e3 * each, 4) for each in self.timing.seconds],
            "of_base": None if self.ratio is None else round(self.ratio, 4),
            "floor_of_base": None if self.floor is None else round(self.floor, 4),
        }
