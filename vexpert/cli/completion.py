"""`vexpert completion SHELL`: a script that completes commands, options and choices."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

BASH = """\
_vexpert() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} path="" each
    for each in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$path $each" in
{paths}
        esac
    done
    local words=""
    case "$path $before" in
{choices}
        *) case "$path" in
{words}
        esac ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _vexpert vexpert"""
ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
HELP = (
    'put the output where your shell reads it, e.g. in ~/.bashrc: eval "$(vexpert completion bash)"'
)


@dataclass(frozen=True)
class Command:
    """One command: its path of names, what may follow, and the options with choices."""

    path: tuple[str, ...]
    commands: tuple[str, ...]
    flags: tuple[str, ...]
    choices: dict[str, tuple[str, ...]]  # by flag; "": of a positional


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell's name."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help=HELP)


def run(args: argparse.Namespace) -> int:
    """Print the script; 0."""
    from vexpert.cli.main import build_parser

    commands = list(walk(build_parser()))
    script = fish(commands) if args.shell == "fish" else bash(commands)
    print((ZSH if args.shell == "zsh" else "") + script)
    return 0


def walk(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Command]:
    """The parser's command and those below it."""
    below: dict[str, argparse.ArgumentParser] = {}
    flags: list[str] = []
    choices: dict[str, tuple[str, ...]] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            below = dict(action.choices)
            continue
        flags += action.option_strings
        if action.choices is not None:
            names = action.option_strings or [""]
            choices |= dict.fromkeys(names, tuple(map(str, action.choices)))
    yield Command(path, tuple(below), tuple(flags), choices)
    for name, each in below.items():
        yield from walk(each, (*path, name))


def bash(commands: list[Command]) -> str:
    """The script for bash; zsh reads it with bashcompinit."""
    paths, choices, words = [], [], []
    for command in commands:
        path = "".join(f" {name}" for name in command.path)
        if command.path:
            before = "".join(f" {name}" for name in command.path[:-1])
            paths.append(f'            "{before} {command.path[-1]}") path="{path}" ;;')
        for flag, values in command.choices.items():
            if flag:
                choices.append(f'        "{path} {flag}") words="{" ".join(values)}" ;;')
        follow = (*command.commands, *command.choices.get("", ()), *command.flags)
        words.append(f'            "{path}") words="{" ".join(follow)}" ;;')
    return BASH.format(paths="\n".join(paths), choices="\n".join(choices), words="\n".join(words))


def fish(commands: list[Command]) -> str:
    """The script for fish."""
    lines = []
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in command.path]
        if command.commands:
            seen.append(f"not __fish_seen_subcommand_from {' '.join(command.commands)}")
        start = f"complete -c vexpert -n '{'; and '.join(seen) or 'true'}'"
        follow = (*command.commands, *command.choices.get("", ()))
        if follow:
            lines.append(f"{start} -f -a '{' '.join(follow)}'")
        for flag in command.flags:
            kind = "-l" if flag.startswith("--") else "-s"
            values = command.choices.get(flag)
            more = f" -x -a '{' '.join(values)}'" if values else ""
            lines.append(f"{start} {kind} {flag.lstrip('-')}{more}")
    return "\n".join(lines)
