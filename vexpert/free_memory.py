"""How much host memory this process may still take: of the machine, and of its container."""

import os
from pathlib import Path

from vexpert.errors import ConfigError

UNBOUNDED = 2**62  # bytes
REMEDY = "set kv_cache_memory, lora_memory and lora_host_memory in bytes"


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes, within the control group where there is one; half of all where nothing tells.

    `root`: where /proc and /sys are. Raises ConfigError where memory cannot be read.
    """
    meminfo = root / "proc" / "meminfo"
    if meminfo.exists():
        return min(_available(meminfo), _available_to_group(root / "sys" / "fs" / "cgroup"))
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError) as error:
        raise ConfigError(f"free memory cannot be read on this system: {REMEDY}") from error
    return total // 2


def _available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo names no MemAvailable: {REMEDY}")


def _available_to_group(group: Path) -> int:
    """Files that were read, such as checkpoints, count as used there until others need the room."""
    limit, used, stat = (group / f"memory.{name}" for name in ("max", "current", "stat"))
    if not limit.exists() or limit.read_text().strip() == "max":
        return UNBOUNDED
    rows = dict(line.split() for line in stat.read_text().splitlines()) if stat.exists() else {}
    taken = int(used.read_text()) - int(rows.get("inactive_file", 0))
    return max(0, int(limit.read_text()) - max(0, taken))
