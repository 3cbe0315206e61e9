"""`vexpert collect-env`: what a bug report needs to say. Nothing here fails when a part lacks."""

import argparse
import importlib.metadata
import os
import platform
from pathlib import Path

from vexpert import __version__
from vexpert.checkout import commit

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "huggingface-hub",
    "peft", "accelerate", "numba", "xgrammar", "jinja2", "pyyaml", "fastapi", "starlette",
    "uvicorn", "pydantic", "prometheus-client", "httpx", "openai", "rich", "matplotlib",
)  # fmt: skip
# Variables that change what is measured or found; of others a value might be a secret.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GOMP_SPINCOUNT", "HF_HOME", "HF_HUB_OFFLINE", "LD_LIBRARY_PATH",
    "LD_PRELOAD", "NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "TRITON_CACHE_DIR",
    "TRITON_INTERPRET",
)  # fmt: skip
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
MISSING = "not installed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(args: argparse.Namespace) -> int:
    """Print one `name: value` line each; 0."""
    print("\n".join(f"{name}: {value}" for name, value in collect().items()))
    return 0


def collect() -> dict[str, str]:
    """Versions and hardware, by name."""
    facts = {"vexpert": __version__, "commit": commit() or "unknown: not a git checkout"}
    facts |= {"python": platform.python_version()}
    facts |= {name: _version(name) for name in PACKAGES}
    facts |= {"platform": platform.platform(), "cpu": _cpu(), "cpu cores": str(os.cpu_count())}
    facts |= {"cpu cores usable": str(_usable_cores()), "cpu features": _cpu_features()}
    facts |= {"memory": _memory()} | _accelerators()
    return facts | {name: os.environ[name] for name in VARIABLES if name in os.environ}


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


def _usable_cores() -> int:
    """Cores that this process may use: containers and schedulers give fewer."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_features() -> str:
    """Those of CPU_FLAGS that Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    told = [line for line in lines if line.lower().startswith(("flags", "features"))]
    flags = set(told[0].partition(":")[2].split()) if told else set()
    return " ".join(flag for flag in CPU_FLAGS if flag in flags) or "none known"


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
    return facts | {
        "cuda": str(torch.version.cuda),
        "gpu driver": _driver(),
    }


def _driver() -> str:
    """The driver's own line where Linux has it."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return "unknown"
