"""Fixtures of the server's tests; a test module asks for them by `pytest_plugins`."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers_fake_engine import FakeEngine, make_fake_engine
from helpers_server import ENGINES, RunningServer, serving


@pytest.fixture(params=list(ENGINES), scope="module")
def engine_factory(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes an engine that serves the demo's five names; each entry of ENGINES in turn."""
    return ENGINES[request.param]


@pytest.fixture(scope="module")
def server(engine_factory: Callable[[], Any]) -> Iterator[RunningServer]:
    """A server that the tests of a module share: they must leave it as they found it."""
    with serving(engine_factory()) as running:
        yield running


@pytest.fixture
def fake() -> FakeEngine:
    """A fake engine of one test's own."""
    return make_fake_engine()


@pytest.fixture
def fake_server(fake: FakeEngine) -> Iterator[RunningServer]:
    """A server of one test's own, around `fake`."""
    with serving(fake) as running:
        yield running
