"""`vexpert collect-env`: what a bug report needs to say. Nothing here fails when a part lacks."""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

from vexpert import __version__

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "peft", "fastapi",
    "uvicorn", "pydantic", "prometheus-client", "httpx", "openai",
)  # fmt: skip
MISSING = "not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Print one `name: value` line each; 0."""
    print("\n".join(f"{name}: {value}" for name, value in collect().items()))
    return 0


def collect() -> dict[str, str]:
    """Versions and hardware, by name."""
    facts = {"vexpert": __version__, "python": platform.python_version()}
    facts |= {name: _version(name) for name in PACKAGES}
    facts |= {"platform": platform.platform(), "cpu": _cpu(), "cpu cores": str(os.cpu_count())}
    return facts | {"memory": _memory()} | _accelerators()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return MISSING


def _cpu() -> str:
    """The processor's own name where Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size / 2**30:.1f} GiB"


def _accelerators() -> dict[str, str]:
    try:
        import torch
    except ImportError:
        return {"gpu": "unknown: torch is not installed"}
    if not torch.cuda.is_available():
        return {"gpu": "none", "torch threads": str(torch.get_num_threads())}
    count = torch.cuda.device_count()
    devices = [torch.cuda.get_device_properties(i) for i in range(count)]
    facts = {
        f"gpu {i}": f"{d.name}, {d.total_memory / 2**30:.1f} GiB, capability {d.major}.{d.minor}"
        for i, d in enumerate(devices)
    }
    return facts | {"cuda": str(torch.version.cuda)}
