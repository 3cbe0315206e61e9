"""The API key, and what is open without it."""

import openai
import pytest
from helpers_server import BASE, make_fake_engine, serving

from vexpert.server.options import ServerOptions

OPTIONS = ServerOptions((BASE, "alias"), api_keys=("secret", "other"), status_interval=None)


@pytest.fixture(scope="module")
def locked():
    with serving(make_fake_engine(), OPTIONS) as running:
        yield running


@pytest.mark.parametrize("key", ["secret", "other"])
def test_a_right_key_opens(locked, key: str) -> None:
    with locked.client(api_key=key) as client:
        assert [entry.id for entry in client.models.list()][:2] == [BASE, "alias"]


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Bearer secre", "Basic secret", "secret"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/v1/nothing", "/version"])
def test_without_it_everything_is_401(locked, header: str | None, path: str) -> None:
    response = locked.get(path, headers={"Authorization": header} if header else {})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert response.headers["www-authenticate"] == "Bearer"


def test_openais_client_sees_an_authentication_error(locked) -> None:
    with locked.client(api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(model=BASE, prompt="x")
    assert locked.engine.submitted == []


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_probes_need_no_key(locked, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_every_served_name_is_the_base_model(locked) -> None:
    with locked.client(api_key="secret") as client:
        for name in (BASE, "alias"):
            answer = client.completions.create(model=name, prompt="word")
            assert (answer.model, answer.choices[0].text) == (name, "word")
        parents = {entry.model_dump()["parent"] for entry in client.models.list()}
    assert parents == {None, BASE}
