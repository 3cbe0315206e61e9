"""`python -m vexpert`."""

try:
    from vexpert.cli.main import main
except KeyboardInterrupt:  # Ctrl-C while the command is imported needs no traceback
    raise SystemExit(130) from None

if __name__ == "__main__":
    raise SystemExit(main())
