"""Without a GPU, Triton's kernels run in its interpreter; tests marked `gpu` are skipped.

Every test draws the same numbers in every run, whatever ran before it in its process.
"""

import importlib.util
import os
from pathlib import PurePath
from typing import Any

import pytest
import torch

# Files whose tests share something that takes seconds to start: a server, an engine, a browser.
# Of two processes that divide the tests, one takes all of a group, and takes it first.
TOGETHER = {
    "test_docs_api.py": "the demo, served",
    "test_docs_pages.py": "the demo, served",
    "test_http_end_to_end.py": "the demo, served",
    "test_web_browser.py": "the demo, served",
    "test_end_to_end.py": "the demo's engine",
    "test_engine_structured.py": "compiled grammars",
    "test_http_layout.py": "a server of grouped columns",
    "test_readme.py": "make serve",
    "test_server_hang.py": "a server whose engine is stopped",
    "test_server_robust.py": "a server under attack",
    "test_server_tools.py": "the demo with tools",
}
# Tests load nothing from a hub; a look-up there would only wait for its retries.
os.environ["HF_HUB_OFFLINE"] = "1"
# Hypothesis draws the same examples in every run, and measures no time: a slow machine is no fault.
# `--hypothesis-profile=default` looks for new ones.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "repeatable",
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("repeatable")
# Triton reads this when it is imported, which happens with the first kernel module.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is not None:
        from helpers_interpreter import make_quick

        make_quick()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before its fixtures: PyTorch's numbers do not depend on the tests that came before."""
    torch.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One test at a time, but TOGETHER by group. (`xdist_group` marks groups by changing ids.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return TOGETHER.get(PurePath(nodeid.split("::")[0]).name, nodeid)

    return Scheduling(config, log)
