"""`python -m vexpert`."""

from vexpert.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
