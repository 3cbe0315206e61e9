"""What an adapter may be called."""

import unicodedata

from vexpert.config import shown
from vexpert.errors import AdapterNameError

MAX_NAME = 256  # characters


def check_name(name: str, reserved: frozenset[str]) -> None:
    """Raise AdapterNameError unless `name` may name an adapter.

    BASE:ADAPTER means an adapter too, and a page of the server stands for itself among the names
    of a key: neither may be hidden by an adapter of that name.
    """
    if not isinstance(name, str):
        raise AdapterNameError(f"adapter name {shown(name)}: must be a string")
    if len(name) > MAX_NAME:
        raise AdapterNameError(f"adapter name {shown(name)}: use at most {MAX_NAME} characters")
    if not name or name != name.strip():
        raise AdapterNameError(
            f"adapter name {shown(name)}: must be non-empty, with no space at its ends"
        )
    if any(unicodedata.category(char).startswith("C") for char in name):
        raise AdapterNameError(f"adapter name {shown(name)}: must have no control characters")
    if name in reserved:
        raise AdapterNameError(
            f"adapter name {shown(name)} is the base model's: choose another name"
        )
    if name.startswith("/"):
        raise AdapterNameError(f"adapter name {shown(name)}: must not begin with '/', as pages do")
    base = next((base for base in reserved if name.startswith(f"{base}:")), None)
    if base is not None:
        short = name.removeprefix(f"{base}:")
        raise AdapterNameError(
            f"adapter name {shown(name)}: the base model's name and a colon go before any adapter's"
            f" name; choose another, such as {shown(short)}"
        )
