"""What a hostile or careless world sends: malformed bodies, clients that leave, the whole schema.

VEXPERT_STRESS=20 makes the counts 20 times those of an ordinary run: 10,000 bodies and 2,000
connections.
"""

import asyncio
import os
import random
import resource
import subprocess
from typing import Any

import httpx
import pytest
from helpers_malformed import malformed
from helpers_server import (
    BASE,
    NAMES,
    RunningServer,
    make_fake_engine,
    right_answer,
    serving,
    wait_for,
)

from vexpert import demo
from vexpert.config import EngineConfig
from vexpert.server.engine_boot import build_engine, read_tokenizer
from vexpert.server.engine_process import EngineProcess
from vexpert.server.interface import LoraModule
from vexpert.server.options import ServerOptions

FACTOR = int(os.environ.get("VEXPERT_STRESS", "1"))
OPTIONS = ServerOptions((BASE,), tool_call_parser="hermes", status_interval=None, access_log=False)


@pytest.fixture(scope="module")
def server() -> Any:
    """The demo with its adapters; a small cache, so that sequences compete for blocks."""
    config = EngineConfig(model=str(demo.model_path()), max_num_seqs=32, kv_cache_memory=2_000_000)
    host = EngineProcess(config, build_engine, read_tokenizer)
    host.launch([LoraModule(name, str(path)) for name, path in demo.adapter_paths().items()])
    try:
        host.connect()
        with serving(host, OPTIONS) as running:
            yield running
    finally:
        host.close()


def memory(server: RunningServer) -> int:
    """Resident bytes of this process, at their peak, and of the engine's."""
    command = ["ps", "-o", "rss=", "-p", str(server.engine.pid)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (own + int(shown)) * 1024


def test_malformed_bodies_get_a_4xx_and_leave_nothing(server: RunningServer) -> None:
    rng = random.Random(1)
    headers = {"Content-Type": "application/json"}
    seen: dict[int, int] = {}
    after_warm_up = 0
    for i in range(500 * FACTOR):
        path, content = malformed(rng)
        response = server.post(path, content=content, headers=headers)
        assert response.status_code < 500, (path, content, response.text)
        if response.status_code >= 400:
            assert response.json()["error"]["message"], (path, content)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        if i == 250 * FACTOR:
            after_warm_up = memory(server)
    assert seen[400] > 200 * FACTOR
    assert seen[200] > 5
    assert memory(server) - after_warm_up < 64 * 2**20
    assert server.ask("upper", "hello") == "HELLO"
    server.run(server.app.state.service.engine.check_integrity())


async def visit(client: httpx.AsyncClient, i: int, rng: random.Random) -> bool:
    """One client; 30% leave at a random moment. Whether it stayed."""
    name, word = [BASE, *NAMES][i % 5], f"{'abcdefgh'[i % 8]}hello"
    body: dict[str, Any] = {
        "model": name,
        "messages": [{"role": "user", "content": word}],
        "temperature": 0,
        "stream": i % 2 == 0,
    }
    leaves = rng.random() < 0.3
    if leaves:
        body |= {"max_tokens": 100, "ignore_eos": True}
    work = asyncio.ensure_future(client.post("/v1/chat/completions", json=body))
    if leaves:
        await asyncio.sleep(rng.random() * 0.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        return False
    response = await work
    assert response.status_code == 200, response.text
    expected = right_answer(name, word)
    if i % 2:
        assert response.json()["choices"][0]["message"]["content"] == expected
    else:
        events = [line[6:] for line in response.text.split("\n\n") if line.startswith("data: {")]
        parts = [httpx.Response(200, text=e).json()["choices"][0]["delta"] for e in events]
        assert "".join(part.get("content") or "" for part in parts) == expected
    return True


def test_clients_that_leave_at_random_cost_the_others_nothing(server: RunningServer) -> None:
    count = 100 * FACTOR
    rng = random.Random(2)

    async def visit_all() -> list[bool]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=limits) as client:
            return await asyncio.gather(*(visit(client, i, rng) for i in range(count)))

    stayed = asyncio.run(visit_all())
    assert 0.6 * count < sum(stayed) < 0.8 * count
    service = server.app.state.service
    # Connections are taken in their order: those of clients that left have been, after this one.
    assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
    wait_for(lambda: service.active == 0 and service.engine.num_sequences == 0)

    def left() -> tuple[int, int, int]:
        stats = server.run(service.engine.stats())
        return stats.num_running, stats.num_waiting, stats.kv_blocks_used

    wait_for(lambda: left() == (0, 0, 0))
    server.run(service.engine.check_integrity())
    for name in [BASE, *NAMES]:
        assert server.ask(name, "still") == right_answer(name, "still")


def test_the_schema_is_what_the_server_does() -> None:
    """Requests made from /openapi.json, right ones and wrong ones: no 5xx, answers as described."""
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, Verbosity, given, settings
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, response_schema_conformance]
    positive = schemathesis.GenerationMode.POSITIVE
    engine = make_fake_engine()
    with serving(engine, OPTIONS) as running:
        schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
        operations = [result.ok() for result in schema.get_all_operations()]
        assert len(operations) >= 12
        for operation in operations:
            # A GET without parameters cannot be asked wrongly.
            modes = list(schemathesis.GenerationMode) if operation.method == "post" else [positive]
            for mode in modes:

                @settings(
                    max_examples=12 * FACTOR,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    phases=[Phase.generate],
                    verbosity=Verbosity.quiet,
                    suppress_health_check=list(HealthCheck),
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    case.call_and_validate(base_url=running.url, checks=checks, timeout=60)

                check()
        assert running.ask("upper", "hello") == "HELLO"
        wait_for(lambda: not engine.requests)


def test_the_openapi_page_tells_answers_and_errors() -> None:
    with serving(make_fake_engine(), OPTIONS) as running:
        assert running.get("/docs").status_code == 200
        document = running.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    assert {"400", "401", "404", "413", "429", "500", "503"} <= set(chat["responses"])
    assert "422" not in str(document["paths"])
    body = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    fields = document["components"]["schemas"][body]["properties"]
    assert {"messages", "tools", "response_format", "structured_outputs"} <= set(fields)
