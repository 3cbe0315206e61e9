"""Compiles latent attention's kernels for an H200 without a GPU, and prints as one JSON line how
many bytes of registers each spills and how much shared memory it takes.

A process of its own, as `helpers_compile`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from helpers_compile import Driver
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from vexpert.kernels.dense_factors import HeadColumns
from vexpert.kernels.dense_order import RowOrder
from vexpert.kernels.head_lora import head_lora
from vexpert.kernels.paged_types import AttentionBatch
from vexpert.ops import attention

RANK, ROTARY, BLOCK = 512, 64, 16
HEADS = (16, 20, 32, 128)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compile_only(found: dict[str, dict[str, int]]) -> None:
    """From here on kernels are compiled, not run; what they take goes to `found` by name."""
    run = JITFunction.run

    def compile_it(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found[self.fn.__name__] = {
            "spilled": spilled(kernel.asm["ptx"]),
            "shared": kernel.metadata.shared,
        }
        return kernel

    JITFunction.run = compile_it


def spilled(ptx: str) -> int:
    """Bytes that NVIDIA's assembler stores for want of registers."""
    found = re.search(r"\.target (\w+)", ptx)
    assert found is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        tool = [get_ptxas(90).path, "-v", f"--gpu-name={found[1]}", source, "-o", "/dev/null"]
        said = subprocess.run(tool, capture_output=True, text=True, check=True).stderr
    return sum(int(count) for count in re.findall(r"(\d+) bytes spill stores", said))


def attend(heads: int, dtype: torch.dtype, queries: int) -> None:
    """Of two sequences with `queries` rows each."""
    both = torch.empty(64, 1, RANK + ROTARY, dtype=dtype)
    keys, values = torch.split(both, [RANK, ROTARY], 2)
    query = torch.empty(2 * queries, heads, 128 + RANK, dtype=dtype)
    batch = AttentionBatch(
        query_starts=torch.zeros(3, dtype=torch.int64),
        kv_lens=torch.zeros(2, dtype=torch.int64),
        block_tables=torch.zeros(2, 256, dtype=torch.int64),
        block_size=BLOCK,
        max_query_len=queries,
        max_kv_len=4096,
    )
    absorbed, rotary = query[..., 128:].contiguous(), query[..., 64 : 64 + ROTARY]
    attention.latent_attention(absorbed, rotary, keys, values, batch, scaling=0.1)


def adapt(rows: int, dtype: torch.dtype, of_keys: bool) -> None:
    columns = HeadColumns(16, 128, 128)
    ints = torch.zeros(rows, dtype=torch.int32)
    order = RowOrder(torch.zeros(rows, dtype=torch.int64), *(ints,) * 8, is_identity=rows == 1)
    latents, own = (torch.empty(rows, 16, width, dtype=dtype) for width in (RANK, 128))
    x, y = (own, latents) if of_keys else (latents, own)
    where = torch.empty(64, dtype=dtype), torch.zeros(7, 4, dtype=torch.int64)
    head_lora(x, y, order, *where, columns, of_keys, most_rank=16, alignment=8)


def main() -> None:
    driver.set_active(Driver())
    attention.check_attention = lambda *_: None  # type: ignore[assignment]
    taken: dict[str, dict[str, int]] = {}
    found: dict[str, dict[str, int]] = {}
    compile_only(found)

    def keep(case: str) -> None:
        taken.update({f"{name}, {case}": what for name, what in found.items()})
        found.clear()

    for dtype in DTYPES:
        for heads in HEADS:
            attend(heads, dtype, 1)
            attend(heads, dtype, 40)
            keep(f"{heads} heads, {dtype}")
        for rows in (1, 8, 4096):
            for of_keys in (True, False):
                adapt(rows, dtype, of_keys)
                keep(f"{rows} rows, keys {of_keys}, {dtype}")
    sys.stdout.write(json.dumps(taken) + "\n")


if __name__ == "__main__":
    main()
