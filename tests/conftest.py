"""Without a GPU, Triton's kernels run in its interpreter; tests marked `gpu` are skipped."""

import importlib.util
import os

import pytest
import torch

# Tests load nothing from a hub; a look-up there would only wait for its retries.
os.environ["HF_HUB_OFFLINE"] = "1"
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
