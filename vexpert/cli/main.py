"""`vexpert COMMAND`: parse, then import what the command needs."""

import importlib
import os
import sys
from collections.abc import Sequence

from vexpert import __version__
from vexpert.cli.examples import EXAMPLES, examples
from vexpert.cli.parser import Parser
from vexpert.early import release
from vexpert.errors import AdapterError, VexpertError

# Each module has add_arguments(parser) and run(args) -> exit code, and imports heavy things in run.
COMMANDS = {
    "serve": ("vexpert.cli.serve", "serve a model and its adapters over HTTP"),
    "chat": ("vexpert.cli.chat", "talk to a running server"),
    "adapter": ("vexpert.cli.adapter", "look at an adapter, check that it is served right"),
    "bench": ("vexpert.cli.bench.main", "measure speed"),
    "collect-env": ("vexpert.cli.collect_env", "print versions and hardware, for bug reports"),
    "completion": ("vexpert.cli.completion", "print a script that completes commands in a shell"),
}

# Packages of the extra `serve`, which a plain installation lacks.
EXTRAS = {
    "fastapi",
    "uvicorn",
    "starlette",
    "pydantic",
    "prometheus_client",
    "httpx",
    "rich",
    "yaml",
    "msgpack",
}


def build_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="vexpert",
        description="Many LoRA adapters on one MoE model at once.",
        epilog=examples("vexpert", EXAMPLES["vexpert"]),
    )
    parser.add_argument("--version", action="version", version=f"vexpert {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, help) in COMMANDS.items():
        epilog = examples(f"vexpert {name}", EXAMPLES.get(name, ()))
        command = commands.add_parser(name, help=help, description=help, epilog=epilog)
        importlib.import_module(module).add_arguments(command)
        command.set_defaults(module=module)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit code: 0, 1 when something failed, 2 for the caller's mistakes."""
    try:
        args = build_parser().parse_args(arguments)  # imports: a Ctrl-C may come meanwhile
        run = importlib.import_module(args.module).run
        release()
        code = int(run(args))
        print(end="", flush=True)  # here a reader that is gone is met below
        return code
    except AdapterError as error:  # its lists of keys are lines of their own
        print(f"error: {error}", file=sys.stderr)
        return 2
    except VexpertError as error:
        message = " ".join(str(error).split())
        print(f"error: {message}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        print(f"error: {error.name} is missing; pip install 'vexpert[serve]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone, e.g. `| head`; keep the interpreter from saying so.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
