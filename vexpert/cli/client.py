"""A small client of an OpenAI-compatible server."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from vexpert.config import shown
from vexpert.errors import ConfigError, RequestError


@dataclass
class Reply:
    """One streamed answer and its times in seconds, perf_counter."""

    started: float
    text: str = ""
    token_times: list[float] = field(default_factory=list)  # of each chunk with text
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ended: float = 0.0

    def take(self, chunk: dict[str, Any]) -> str:
        """Count a chunk in; the text it adds."""
        added = ""
        for choice in chunk["choices"]:
            added = choice.get("text") or choice.get("delta", {}).get("content") or ""
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if added:
            self.token_times.append(time.perf_counter())
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = details.get("cached_tokens") or 0
        self.text += added
        return added

    def stats_line(self) -> str:
        """What a person may want to know of one turn."""
        seconds = self.ended - self.started
        first = (self.token_times[0] if self.token_times else self.ended) - self.started
        rate = self.completion_tokens / seconds
        return (
            f"{self.completion_tokens} tokens in {seconds:.2f} s ({rate:.0f}/s), first at "
            f"{1000 * first:.0f} ms; prompt {self.prompt_tokens}, cached {self.cached_tokens}; "
            f"finished: {self.finish_reason}"
        )


def base_url(text: str) -> str:
    """The server's address as people write it: without a scheme, or with the /v1 of clients."""
    url = text.rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


class Client:
    """Calls of one server. Errors are ConfigError (unreachable) or RequestError (refused).

    Without `api_key`, the environment's OPENAI_API_KEY is sent if it is set.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        api_key = api_key or os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._url = base_url(url)
        try:
            self._http = httpx.AsyncClient(
                base_url=self._url,
                headers=headers,
                timeout=httpx.Timeout(600, connect=5),
                limits=limits,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"url={shown(url)}: {error}") from error
        except UnicodeEncodeError as error:
            raise ConfigError("api_key: has characters that no header may have") from error

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """Entries of /v1/models."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _check(response.status_code, response.text)
        return list(response.json()["data"])

    async def stream(
        self, path: str, body: dict[str, Any], show: Callable[[str], None] = lambda text: None
    ) -> Reply:
        """POST `body` with streaming; `show` gets each piece of text as it comes."""
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reply = Reply(time.perf_counter())
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    _check(response.status_code, (await response.aread()).decode())
                async for chunk in _chunks(response):
                    show(reply.take(chunk))
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except UnicodeEncodeError as error:
            raise RequestError(f"the text is not valid Unicode: {error.reason}") from error
        reply.ended = time.perf_counter()
        return reply

    async def chat(
        self,
        model: str,
        messages: list[dict[str, str]],
        options: dict[str, Any],
        show: Callable[[str], None] = lambda text: None,
    ) -> Reply:
        """One chat turn."""
        body = {"model": model, "messages": messages, **options}
        return await self.stream("/v1/chat/completions", body, show)

    async def compare(
        self, models: list[str], messages: list[dict[str, str]], options: dict[str, Any]
    ) -> dict[str, str]:
        """The answers of `models` to the same messages, all asked at once."""
        replies = await asyncio.gather(*(self.chat(name, messages, options) for name in models))
        return {name: reply.text for name, reply in zip(models, replies, strict=True)}

    def _unreachable(self, error: Exception) -> ConfigError:
        cause = str(error) or type(error).__name__
        return ConfigError(f"{self._url}: {cause}; is `vexpert serve` running there? see --url")


def _check(status: int, text: str) -> None:
    if status == 200:
        return
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    remedy = "; give --api-key or set OPENAI_API_KEY" if status == 401 else ""
    raise RequestError(f"the server answers {status}: {message}{remedy}")


async def _chunks(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        content = line.removeprefix("data: ")
        if content == line or content == "[DONE]":
            continue
        chunk = json.loads(content)
        if "error" in chunk:
            raise RequestError(f"the server failed: {chunk['error']['message']}")
        yield chunk
