"""What the text of a completion must be: a JSON document, a regular expression, a grammar."""

import json
from dataclasses import dataclass, field
from typing import Any

from vexpert.config import shown
from vexpert.engine.json_form import compiled_form
from vexpert.engine.json_schema import check_schema
from vexpert.engine.regex_parser import RegexError
from vexpert.engine.regex_writer import rewritten
from vexpert.errors import RequestError

PARAM = "structured_outputs"
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
MAX_CHARACTERS = 65536  # of a schema, a grammar or all choices together: compiles in about 1 s
MAX_REGEX = 8192  # characters
CHARACTERS = 64  # of choices that weigh as much as a state
UNKNOWN_SIZE = 2**31  # of a grammar that nobody has read
MAX_WHITESPACE = 32  # characters in a row between two parts of a JSON document


class _Fault(ValueError):
    """What is wrong with a constraint."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise _Fault(message)


@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on the whole output. Exactly one of the kinds is set; else RequestError.

    `json` is a JSON schema, parsed or as text; `json_object` any JSON object; `regex` matches the
    whole output; `choice` is a list of strings; `grammar` is EBNF as xgrammar reads it, its start
    rule `root`; `structural_tag` is xgrammar's own form. `strict`: an object of a schema has no
    property that the schema does not name, unless its additionalProperties says so.
    `special_tokens`: these may come as well, as the text that they stand for.
    """

    json: str | dict[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    strict: bool = True
    disable_any_whitespace: bool = False
    special_tokens: bool = False
    param: str = field(default=PARAM, compare=False)  # the request's field, for messages
    kind: str = field(init=False, default="")  # the one that is set
    text: str = field(init=False, default="", repr=False)  # of it, as the compiler takes it
    size: int = field(init=False, default=0, repr=False)  # in states, about; or UNKNOWN_SIZE

    def __post_init__(self) -> None:
        try:
            self._check()
        except _Fault as fault:
            raise self.refusal(str(fault)) from fault.__cause__

    def refusal(self, message: str) -> RequestError:
        """The error for this constraint."""
        return RequestError(f"{self.param}: {message}", self.param)

    def _check(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) not in (None, False)]
        found = " and ".join(given) or "none"
        _require(len(given) == 1, f"set one of {', '.join(KINDS)}; set: {found}")
        for name in ("strict", "disable_any_whitespace", "special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), f"{name}={shown(value)}: use True or False")
        object.__setattr__(self, "kind", given[0])
        text, size = self._compiled(getattr(self, given[0]))
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "size", size)

    def _compiled(self, value: Any) -> tuple[str, int]:
        """(text, size)."""
        match self.kind:
            case "json":
                return _schema_text(value, self.strict)
            case "json_object":
                _require(value is True, f"json_object={shown(value)}: use True")
                return '{"type":"object"}', 1
            case "structural_tag":
                return _document_text("structural_tag", value), UNKNOWN_SIZE
            case "choice":
                grammar = _choice_grammar(value)
                return grammar, len(grammar) // CHARACTERS
        _require(isinstance(value, str) and value != "", f"{self.kind}: use a string, not empty")
        if self.kind == "regex":
            return _regex_text(value)
        return _checked(self.kind, value), UNKNOWN_SIZE


def _checked(name: str, text: str, limit: int = MAX_CHARACTERS) -> str:
    """`text`, if a compiler can take it."""
    rule = f"{name}: {len(text)} characters; use at most {limit}"
    _require(len(text) <= limit, rule)
    _require("\x00" not in text, f"{name}: must not hold the character U+0000")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Fault(f"{name}: not valid Unicode text: {error.reason}") from error
    return text


def _document_text(name: str, value: Any) -> str:
    """A JSON object as text, from an object or from text."""
    if isinstance(value, str):
        _checked(name, value)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:  # ValueError: an integer of 4300 digits too
            raise _Fault(f"{name}: not valid JSON: {error}") from error
    _require(isinstance(value, dict), f"{name}={shown(value)}: use a JSON object")
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Fault(f"{name}: not a JSON document: {error}") from error
    return _checked(name, text)


def enforceable(schema: dict[str, Any], param: str) -> tuple[Any, int]:
    """(a JSON schema as it may stand in a structural tag, its size in states).

    RequestError if it cannot be enforced.
    """
    try:
        text, size = _schema_text(schema, True)
    except _Fault as fault:
        raise RequestError(f"{param}: {fault}", param) from fault
    return json.loads(text), size


def own_tag(tag: str, size: int, param: str, special_tokens: bool = False) -> StructuredOutputs:
    """A structural tag that holds nothing but what `enforceable` returned, of `size` together."""
    made = StructuredOutputs(structural_tag=tag, param=param, special_tokens=special_tokens)
    object.__setattr__(made, "size", size)
    return made


def _schema_text(value: Any, strict: bool) -> tuple[str, int]:
    schema = json.loads(_document_text("json", value))
    fault = check_schema(schema, strict)
    _require(fault is None, f"json: {fault}")
    form, size = compiled_form(schema, strict)
    return json.dumps(form, ensure_ascii=False, separators=(",", ":")), size


def _regex_text(value: str) -> tuple[str, int]:
    try:
        return rewritten(_checked("regex", value, MAX_REGEX))
    except RegexError as error:
        raise _Fault(f"regex: {error}") from error


def _choice_grammar(choices: Any) -> str:
    is_list = isinstance(choices, list | tuple) and all(isinstance(c, str) for c in choices)
    _require(is_list and len(choices) > 0 and all(choices), "choice: use a list of strings")
    for choice in choices:
        _checked("choice", choice)
    # A JSON string is an EBNF literal, but for characters that JSON writes as two.
    literals = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices)]
    return _checked("choice", f"root ::= {' | '.join(literals)}")
