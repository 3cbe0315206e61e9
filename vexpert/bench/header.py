"""Where figures come from: machine, versions, commit, date, method."""

import importlib.metadata
import platform
import subprocess
import time
from collections.abc import Mapping

import torch

import vexpert
from vexpert.checkout import commit

UNKNOWN = "unknown"


def _output(*command: str) -> str:
    """First line that a program prints, or "unknown" where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return done.stdout.strip().partition("\n")[0] or UNKNOWN


def _triton() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def describe(device: torch.device) -> dict[str, str]:
    """Facts by name, in the order to print them."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    else:
        name, driver = f"{platform.machine()}, {torch.get_num_threads()} threads", "none"
    return {
        "device": name,
        "driver": driver,
        "torch": torch.__version__,
        "triton": _triton(),
        "vexpert": vexpert.__version__,
        "commit": commit() or UNKNOWN,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def stamp(facts: Mapping[str, str]) -> dict[str, str]:
    """Of `describe`, what each row carries: so that a row out of its file says whose it is."""
    return {"device": facts["device"], "commit": facts["commit"]}
