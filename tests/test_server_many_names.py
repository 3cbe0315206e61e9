"""A server of thousands of names: what one request costs does not grow with them."""

from collections.abc import Iterator

import pytest
from helpers_server import BASE, FakeEngine, RunningServer, make_fake_engine, serving

from vexpert.server import listing
from vexpert.server.options import ServerOptions

NAMES = 3000
MESSAGES = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def engine() -> FakeEngine:
    found = make_fake_engine()
    for i in range(NAMES):
        found.load_adapter(f"tenant-{i:04d}", "bundled")
    return found


@pytest.fixture(scope="module")
def many(engine: FakeEngine) -> Iterator[RunningServer]:
    keys = {"few": frozenset({BASE, "upper", "tenant-0007", "nobody"})}
    options = ServerOptions((BASE,), api_keys=("all",), restricted_keys=keys, status_interval=None)
    with serving(engine, options) as server:
        server.http.headers["Authorization"] = "Bearer all"
        yield server


def looks(engine: FakeEngine) -> int:
    """Infos that the engine gave away since this was asked last."""
    count, engine.adapter_listing.looks = engine.adapter_listing.looks, 0
    return count


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"model": "nobody", "messages": MESSAGES}, 404),
        ("/v1/completions", {"model": "nobody", "prompt": "a", "max_tokens": 1}, 404),
        ("/v1/completions", {"model": "tenant-2000", "prompt": "a", "max_tokens": 1}, 200),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404),
        ("/v1/models/nobody", None, 404),
        ("/v1/models/tenant-2000", None, 200),
        ("/v1/adapters/tenant-2000", None, 200),
        ("/v1/adapters?limit=50", None, 200),
        ("/v1/models?limit=50", None, 200),
        ("/metrics", None, 200),
    ],
)  # fmt: skip
def test_few_names_are_looked_at(
    engine: FakeEngine, many: RunningServer, path: str, body: object, status: int
) -> None:
    looks(engine)
    answer = many.get(path) if body is None else many.post(path, json=body)
    assert answer.status_code == status
    assert looks(engine) <= 60
    if status == 404:
        message = answer.json()["error"]["message"]
        assert f"known: {BASE}, reverse, shift, sort, tenant-0000, " in message
        assert message.endswith(f"tenant-0015 and {NAMES + 5 - 20} more")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
def test_a_whole_list_is_made_in_pieces(
    many: RunningServer, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[int] = []
    page = listing.AsyncEngine.adapter_page

    async def watched(*arguments: object) -> object:
        found = await page(*arguments)
        pieces.append(len(found.infos))
        return found

    monkeypatch.setattr(listing.AsyncEngine, "adapter_page", watched)
    answer = many.get(path).json()
    key = "id" if path == "/v1/models" else "name"
    names = [entry[key] for entry in answer["data"] if entry[key] != BASE]
    assert names == sorted(names)
    assert len(names) == sum(pieces) == NAMES + 4
    assert max(pieces) <= listing.PIECE
    assert (answer["has_more"], answer["last_id"]) == (False, "upper")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/adapters"])
def test_pages_together_are_the_list(many: RunningServer, path: str) -> None:
    whole, found = many.get(path).json()["data"], []
    after: dict[str, str] = {}
    while True:
        page = many.get(path, params={"limit": 700, **after}).json()
        found += page["data"]
        assert len(page["data"]) == (700 if page["has_more"] else len(whole) % 700)
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert found == whole


def test_the_first_page_of_models_may_end_among_the_base_names() -> None:
    with serving(make_fake_engine(), ServerOptions(("one", "two"), status_interval=None)) as server:
        page = server.get("/v1/models?limit=1").json()
        assert ([e["id"] for e in page["data"]], page["has_more"]) == (["one"], True)
        page = server.get("/v1/models?limit=2&after=one").json()
        assert [e["id"] for e in page["data"]] == ["two", "reverse"]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("name=TENANT-000&limit=2", ["tenant-0000", "tenant-0001"]),
        ("name=-0007", ["tenant-0007"]),
        ("state=device&limit=1", ["reverse"]),
        ("state=errored&state=host", []),
        ("after=tenant-2998", ["tenant-2999", "upper"]),
    ],
)
def test_adapters_are_chosen_by_state_and_name(
    many: RunningServer, query: str, expected: list[str]
) -> None:
    assert [each["name"] for each in many.get(f"/v1/adapters?{query}").json()["data"]] == expected


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "state=tired"])
def test_a_wrong_choice_is_told(many: RunningServer, query: str) -> None:
    answer = many.get(f"/v1/adapters?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(query.partition("=")[0])


@pytest.mark.parametrize(
    ("path", "param", "told"),
    [
        ("/v1/models?foo=1", "foo", "unknown parameter 'foo': use limit, after, name"),
        ("/v1/models?state=device", "state", "'state': it is one of /v1/adapters; use limit"),
        ("/v1/adapters?stat=device", "stat", "'stat'; did you mean 'state'?"),
        ("/v1/models?limit=1&limit=2", "limit", "limit: given 2 times"),
        ("/v1/adapters?name=a&state=host&name=b", "name", "name: given 2 times"),
        ("/v1/models?%FF=1", None, "unknown parameter"),
    ],
)
def test_a_parameter_that_would_say_nothing_is_refused(
    many: RunningServer, path: str, param: str | None, told: str
) -> None:
    answer = many.get(path)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert told in error["message"]
    assert param in (None, error["param"])


def test_a_key_for_few_gets_few(engine: FakeEngine, many: RunningServer) -> None:
    looks(engine)
    few = {"Authorization": "Bearer few"}
    models = many.get("/v1/models", headers=few).json()["data"]
    assert [each["id"] for each in models] == [BASE, "tenant-0007", "upper"]
    adapters = many.get("/v1/adapters?name=t&limit=5", headers=few).json()
    assert [each["name"] for each in adapters["data"]] == ["tenant-0007"]
    page = many.get("/v1/models?limit=2", headers=few).json()
    assert ([each["id"] for each in page["data"]], page["has_more"]) == (
        [BASE, "tenant-0007"],
        True,
    )
    told = many.get("/v1/models/sort", headers=few).json()["error"]["message"]
    assert told.endswith(f"known: {BASE}, tenant-0007, upper")
    assert looks(engine) < 20


def test_a_name_may_have_the_base_in_front(many: RunningServer) -> None:
    entry = many.get(f"/v1/models/{BASE}:upper").json()
    assert entry == many.get("/v1/models/upper").json() | {"id": f"{BASE}:upper"}
    assert many.get(f"/v1/adapters/{BASE}:upper").json()["data"][0]["name"] == "upper"
    assert many.get(f"/v1/models/{BASE}:nobody").status_code == 404
    few = {"Authorization": "Bearer few"}
    assert many.get(f"/v1/models/{BASE}:upper", headers=few).status_code == 200
    assert many.get(f"/v1/models/{BASE}:sort", headers=few).status_code == 404
