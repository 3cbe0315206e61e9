"""A process that renders chat templates of adapters, which are other people's programs.

A template may loop for hours, or ask for a string of all memory, in one operation that no thread
of the server could end. Here the system ends the process: by its processor time and its memory.
The variables and functions of templates are those that transformers gives them.
"""

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.utils
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_BYTES = 2**30  # of memory
MAX_ERROR = 1000  # characters of what a template says in its refusal


class TooLargeError(ValueError):
    """A template writes more than the prompt may have."""


class _Generation(Extension):
    """`{% generation %}`, which marks the assistant's words for training, means nothing here."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """Without the attributes by which Python tells of itself."""

    def __init__(*arguments: Any, **fields: Any) -> None:  # `self` may be a field
        own, arguments = arguments[0], arguments[1:]
        jinja2.utils.Namespace.__init__(own)
        for name, value in dict(*arguments, **fields).items():
            own[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"{name!r}: names of a namespace begin otherwise")
        super().__setitem__(name, value)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As json.dumps: the filter of jinja2 escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@lru_cache(maxsize=64)
def compiled(template: str) -> jinja2.Template:
    """A template in the sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["dict"] = lambda *pairs, **fields: dict(*pairs, **fields)
    environment.globals["namespace"] = _Namespace
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def render(template: str, variables: dict[str, Any], most: int) -> str:
    """The text of `template`, at most `most` characters. Raises what it raises."""
    pieces, size = [], 0
    for piece in compiled(template).generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > most:
            raise TooLargeError(f"it writes more than {most} characters")
    return "".join(pieces)


def _answer(line: str) -> dict[str, str]:
    try:
        return {"text": render(*json.loads(line))}
    except MemoryError:
        return {"error": f"it takes more than {MAX_BYTES // 2**20} MiB of memory"}
    # A template is a program of other people: what it raises is told to its caller, whatever it is.
    except Exception as error:  # noqa: BLE001
        return {"error": str(error)[:MAX_ERROR] or type(error).__name__}


def main() -> None:
    """The process: a rendering a line, an answer for each, until its input ends.

    Its argument: seconds of the processor that each may take.
    """
    seconds = float(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_BYTES, MAX_BYTES))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        answer = json.dumps(_answer(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(answer, flush=True)
