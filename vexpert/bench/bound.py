"""What LoRA may add to a layer of any shape: the goals of the measured shape, as a rule of bytes.

    bound = LAUNCHES + FACTORS * bytes of factors / bandwidth + ROWS * bytes of rows / bandwidth

Factors: each distinct (adapter, expert) once, as in the floor. Rows: the inputs of both shrinks,
each pair that has an adapter once; they count from thousands of tokens on. The three constants are
fitted to the 15 goals of docs/design.md, section 5 (Qwen3-30B-A3B): the rule gives each of
them within 9%. Bytes are what other shapes change, so the same rule is theirs.
"""

from vexpert.bench.floor import Floor

LAUNCHES = 4.5  # us
FACTORS = 1.25
ROWS = 1.0
SLACK = 1.15  # times the bound, for shapes that nobody tuned


def bound_us(floor: Floor, bandwidth: float) -> float:
    """What LoRA may add, in microseconds; bandwidth in bytes/s."""
    rows = floor.lora_row_bytes / bandwidth * 1e6
    return LAUNCHES + FACTORS * floor.lora_us(bandwidth) + ROWS * rows
