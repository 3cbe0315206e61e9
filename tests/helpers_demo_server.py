"""One `vexpert serve` of the demo, with no option, for every module that leaves it as it was.

A module asks for it by `pytest_plugins`, and says `pytestmark = DEMO_SERVER`: the tests of one
group run in one process, so that the server is started once.
"""

from collections.abc import Iterator

import pytest
from helpers_serve import serve

DEMO_SERVER = pytest.mark.xdist_group("demo server")


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    with serve() as address:
        yield address
