"""Choosing a backend: capability is data, the choice is logged once, nothing falls back."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from helpers_lora_cases import make_case, zeros_for

from vexpert import log
from vexpert.errors import UnsupportedError
from vexpert.ops.backend import select_backend


def test_auto_takes_the_devices_own_and_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_announced", set())
    with caplog.at_level(logging.INFO, "vexpert"):
        assert select_backend("auto", "cpu", torch.float32).name == "numba"
        select_backend("auto", torch.device("cpu"), torch.float32)
        assert select_backend("auto", "cpu", torch.bfloat16).name == "torch"
    assert [r.message for r in caplog.records if r.name.startswith("vexpert")] == [
        "LoRA backend: numba for torch.float32 on cpu (asked for: auto)",
        "LoRA backend: torch for torch.bfloat16 on cpu (asked for: auto)",
    ]


@pytest.mark.parametrize(
    ("name", "device", "dtype", "cause"),
    [
        ("torch", "cuda", torch.float32, "cannot run torch.float32 on cuda: it runs on cpu"),
        ("torch", "cpu", torch.float64, "cannot run torch.float64 on cpu: it computes in"),
        ("triton", "cpu", torch.bfloat16, "cannot run torch.bfloat16 on cpu: it computes in"),
        ("auto", "meta", torch.float32, "cannot run torch.float32 on meta"),
        ("numba", "cpu", torch.bfloat16, "cannot run torch.bfloat16 on cpu: it computes in"),
        ("cutlass", "cpu", torch.float32, "'cutlass' is unknown"),
    ],
)
def test_unsupported_names_the_cause(
    name: str, device: str, dtype: torch.dtype, cause: str
) -> None:
    with pytest.raises(UnsupportedError, match=cause):
        select_backend(name, device, dtype)


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UnsupportedError, match="it runs on cuda"):
        select_backend("triton", "cpu", torch.float32)


@pytest.mark.parametrize("change", ["width", "dtype", "rows"])
def test_operands_that_do_not_fit_are_refused(change: str) -> None:
    case = make_case("mixed")
    x, y = case.x, zeros_for(case)
    if change == "width":
        x = x[:, :-1]
    elif change == "dtype":
        y = y.half()
    else:
        y = y[:-1]
    backend = select_backend("torch", "cpu", torch.float32)
    routing = backend.route(case.slots, case.experts, case.site.num_experts, case.num_slots)
    with pytest.raises(UnsupportedError, match=r"site0: x \(.*do not fit"):
        backend.apply(x, y, case.site, case.table, routing, case.x_rows)


THREADS = """
import torch
from vexpert.ops.backend import select_backend
assert torch.get_num_threads() == 1
assert select_backend("numba", "cpu", torch.float32).name == "numba"
print(torch.get_num_threads())
"""


def test_numbas_threads_change_nothing_about_torchs() -> None:
    """They share OpenMP: more threads than asked for wait for one another at each product."""
    given = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    given["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", THREADS], env=os.environ | given, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("1\n", 0), done.stderr
