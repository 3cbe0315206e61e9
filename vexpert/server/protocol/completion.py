"""Body of POST /v1/completions."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator

from vexpert.config import shown
from vexpert.errors import RequestError
from vexpert.server.protocol.fields import Count, Int64, ListOf, Positive, TopCount, only, refusal
from vexpert.server.protocol.sampling import SamplingFields

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 1024
MAX_COMPLETIONS = 1024  # of all prompts together: each is a sequence of the engine
LARGEST_ID = 2**63
PROMPT_FORMS = "use a string, a list of strings, a list of token ids, or a list of such lists"


def check_prompt(value: Any) -> Any:
    """One message for the four forms, instead of four findings of pydantic."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        raise refusal(PROMPT_FORMS)
    if len(items) > 1 and [] in items:
        raise refusal(f"prompt {items.index([])} is empty; give each at least one token")
    if not (_all(items, str) or _all(items, int) or _all_token_lists(items)):
        raise refusal(PROMPT_FORMS)
    for tokens in [items] if isinstance(items[0], int) else items:
        _check_range(tokens)
    if not isinstance(items[0], int) and len(items) > MAX_PROMPTS:
        raise refusal(f"{len(items)} prompts in one request; send at most {MAX_PROMPTS}")
    return value


def _all(items: list[Any], kind: type) -> bool:
    return all(type(item) is kind for item in items)


def _check_range(tokens: str | list[int]) -> None:
    """By a bound far above all vocabularies: pydantic would tell of another of the four forms."""
    if not isinstance(tokens, str):
        for token in (min(tokens), max(tokens)):
            if not -LARGEST_ID <= token < LARGEST_ID:
                raise refusal(f"{shown(token)} is no token id")


def _all_token_lists(items: list[Any]) -> bool:
    return all(isinstance(item, list) and item and _all(item, int) for item in items)


class CompletionRequest(SamplingFields):
    """A text completion request: OpenAI's fields and vLLM's."""

    route: ClassVar = "/v1/completions"

    prompt: Annotated[
        str | ListOf[str] | ListOf[Int64] | ListOf[ListOf[Int64]], BeforeValidator(check_prompt)
    ]
    best_of: Positive | None = None
    echo: bool | None = None
    logprobs: TopCount | None = None
    max_tokens: Count | None = None
    suffix: Annotated[Any, only("insertion is not served; leave the field out", "")] = None

    def check(self) -> None:
        """Raise RequestError for fields that contradict each other."""
        self.check_stream_fields()
        count, n = len(self.prompts), self.n or 1
        if count * n > MAX_COMPLETIONS:
            message = f"n={n} of {count} prompts: at most {MAX_COMPLETIONS} completions a request"
            raise RequestError(message, "n")
        if self.best_of is not None and self.best_of != (self.n or 1):
            message = f"best_of={self.best_of}: must equal n={self.n or 1}; all n are returned"
            raise RequestError(message, "best_of")
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens=0: must be at least 1, or set echo", "max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise RequestError("echo with logprobs: only without stream", "echo")

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, text or token ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]
        return list(prompt)
