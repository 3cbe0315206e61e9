"""`vexpert chat`: a terminal client that switches adapters as one talks."""

import argparse
import asyncio
import contextlib
import signal
from typing import TYPE_CHECKING, Any

from vexpert.cli.parser import add_client_options, finite
from vexpert.errors import ConfigError, RequestError, VexpertError

if TYPE_CHECKING:
    from rich.console import Console

    from vexpert.cli.client import Client

HELP = """/models          names this server knows
/adapter [NAME]  talk to another of them; without a name: to the first of them
/compare WORDS   ask all of them the same
/new             forget the conversation
/quit            leave, as do Ctrl-D and Ctrl-C"""


def _usage(command: str) -> str:
    """The line of HELP about one command."""
    return "usage: " + next(line for line in HELP.splitlines() if line.startswith(command))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `vexpert chat`."""
    add_client_options(parser, "talk to")
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="default: the first name that the key may use: the base model's, if it may",
    )
    parser.add_argument("--temperature", type=finite, default=0.0, metavar="X", help="0 is greedy")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    once = parser.add_mutually_exclusive_group()
    once.add_argument("--once", metavar="TEXT", help="print the answer and leave")
    once.add_argument(
        "--compare", metavar="TEXT", help="print each name, a tab, its answer, and leave"
    )


def run(args: argparse.Namespace) -> int:
    """Talk; the exit code."""
    if args.compare is not None and args.model is not None:
        raise ConfigError(
            f"model={args.model!r} with compare, which asks all names; leave one of them out"
        )
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from vexpert.cli.client import Client

    options: dict[str, Any] = {"temperature": args.temperature}
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens
    async with Client(args.url, args.api_key) as client:
        names = [entry["id"] for entry in await client.models()]
        chat = Chat(client, args.model or names[0], options, args.system)
        if args.compare is not None:
            for name, text in (await chat.compare(names, args.compare)).items():
                print(f"{name}\t{text}")
            return 0
        if args.once is not None:
            print(await chat.say(args.once))
            return 0
        await chat.check_model(chat.model)
        await chat.converse()
        return 0


def _edit_lines() -> None:
    """Arrow keys and history at the prompt, where Python was built with them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401


def _read_line(prompt: str) -> str:
    """What is typed. Raises EOFError, and KeyboardInterrupt for Ctrl-C.

    In this thread, whose loop has nothing else to do: a thread of its own would keep the program
    from ending until Enter. asyncio's handler would only take a note of Ctrl-C.
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return input(prompt)
    finally:
        signal.signal(signal.SIGINT, handler)


class Chat:
    """One conversation. The adapter may change from turn to turn; the history stays."""

    def __init__(
        self, client: "Client", model: str, options: dict[str, Any], system: str | None
    ) -> None:
        self.model = model
        self._client = client
        self._options = options
        self._system = [{"role": "system", "content": system}] if system else []
        self._turns: list[dict[str, str]] = []

    async def say(self, text: str, console: "Console | None" = None) -> str:
        """One turn; the answer. With a console it appears as it comes, and its statistics."""
        turns = [*self._turns, {"role": "user", "content": text}]

        def show(piece: str) -> None:
            if console is not None:
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

        messages = self._system + turns
        reply = await self._client.chat(self.model, messages, self._options, show)
        if reply.text:
            self._turns = [*turns, {"role": "assistant", "content": reply.text}]
        if console is not None:
            line = f"\n{reply.stats_line()}"
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)
        return reply.text

    async def compare(self, names: list[str], text: str) -> dict[str, str]:
        """What each of `names` answers to `text` alone; no turn of the conversation."""
        messages = [*self._system, {"role": "user", "content": text}]
        return await self._client.compare(names, messages, self._options)

    async def check_model(self, name: str) -> None:
        """Raise RequestError unless the server knows `name`."""
        names = [entry["id"] for entry in await self._client.models()]
        if name not in names:
            raise RequestError(f"no model {name!r}; known: {', '.join(names)}")

    async def converse(self) -> None:
        """Read lines until /quit or the end of input."""
        from rich.console import Console

        _edit_lines()
        console = Console()
        greeting = f"Talking to {self.model}. /help shows the commands."
        console.print(greeting, markup=False, highlight=False)
        while True:
            try:
                line = _read_line(f"{self.model}> ")
            except EOFError:
                return
            except UnicodeDecodeError as error:
                raise RequestError(f"the input is not UTF-8 text: {error.reason}") from error
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                await self._handle(line.strip(), console)
            except VexpertError as error:
                console.print(f"error: {error}", style="red", markup=False, highlight=False)

    async def _handle(self, line: str, console: "Console") -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "":
                return
            case "/help":
                console.print(HELP, markup=False, highlight=False)
            case "/new":
                self._turns = []
            case "/models":
                await self._show_models(console)
            case "/adapter":
                await self._switch(rest.strip())
            case "/compare" if not rest.strip():
                console.print(_usage(command), markup=False, highlight=False)
            case "/compare":
                await self._show_comparison(rest.strip(), console)
            case _ if command.startswith("/"):
                console.print(f"no command {command}\n{HELP}", markup=False, highlight=False)
            case _:
                await self.say(line, console)

    async def _switch(self, name: str) -> None:
        """Talk to `name` from now on; an empty one is the base model."""
        if not name:
            name = (await self._client.models())[0]["id"]
        await self.check_model(name)
        self.model = name

    async def _show_models(self, console: "Console") -> None:
        for entry in await self._client.models():
            mark = "*" if entry["id"] == self.model else " "
            kind = f"adapter, {entry['root']}" if entry.get("parent") else "base model"
            console.print(f"{mark} {entry['id']}  {kind}", markup=False, highlight=False)

    async def _show_comparison(self, text: str, console: "Console") -> None:
        from rich.table import Table
        from rich.text import Text

        names = [entry["id"] for entry in await self._client.models()]
        table = Table("model", "answer")
        for name, answer in (await self.compare(names, text)).items():
            table.add_row(Text(name), Text(answer))
        console.print(table)
