"""One `vexpert serve` of the demo, with no option, for every module that leaves it as it was.

A module asks for it by `pytest_plugins`; `TOGETHER` in conftest.py has it started once.
"""

from collections.abc import Iterator

import pytest
from helpers_serve import serve


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with serve() as address:
        yield address
