"""Free memory: the machine's, or what a container's limit leaves of it."""

from pathlib import Path

import pytest
import torch

from vexpert import free_memory
from vexpert.config import EngineConfig
from vexpert.errors import ConfigError
from vexpert.free_memory import free_host_memory
from vexpert.lora import budget

GIB = 2**30


def system(root: Path, available: int, **group: str) -> Path:
    """A machine's files; `group`: those of the control group."""
    (root / "proc").mkdir()
    (root / "proc" / "meminfo").write_text(
        f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {available // 1024} kB\n"
    )
    folder = root / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    for name, text in group.items():
        (folder / f"memory.{name}").write_text(text)
    return root


def test_this_machines_is_read() -> None:
    assert 2**20 < free_host_memory() < 2**60


@pytest.mark.parametrize(
    ("group", "free"),
    [
        ({}, 40),
        ({"max": "max\n", "current": f"{20 * GIB}\n"}, 40),
        ({"max": f"{16 * GIB}\n", "current": f"{4 * GIB}\n"}, 12),
        # 10 GiB of a checkpoint that was read: the system gives them up when they are needed.
        (
            {
                "max": f"{16 * GIB}\n",
                "current": f"{14 * GIB}\n",
                "stat": f"anon {4 * GIB}\ninactive_file {10 * GIB}\n",
            },
            12,
        ),
        ({"max": f"{16 * GIB}\n", "current": f"{17 * GIB}\n"}, 0),
        ({"max": f"{99 * GIB}\n", "current": "0\n"}, 40),
    ],
)
def test_a_containers_limit_counts(tmp_path: Path, group: dict[str, str], free: int) -> None:
    assert free_host_memory(system(tmp_path, 40 * GIB, **group)) == free * GIB


def test_adapters_keep_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_host_memory", lambda: 10 * GIB)
    assert budget.free_bytes(torch.device("cpu")) == 10 * GIB
    assert budget.host_bytes(EngineConfig()) == 2 * GIB


def test_where_nothing_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(free_memory.os, "sysconf", total.__getitem__)
    assert free_host_memory(tmp_path) == 1000 * 4096 // 2
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1 kB\n")
    with pytest.raises(ConfigError, match="lora_host_memory"):
        free_host_memory(tmp_path)
