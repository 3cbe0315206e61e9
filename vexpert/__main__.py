"""`python -m vexpert`, and what the command `vexpert` calls."""

from vexpert.early import guard

guard()  # before anything is imported that takes time


def main() -> int:
    """Run the command line; the exit code."""
    from vexpert.cli import main as cli

    code = cli.main()
    guard(code)  # what the interpreter does at its end takes time, too
    return code


if __name__ == "__main__":
    raise SystemExit(main())
