"""Formats of strings that the compiler takes too widely or too narrowly, as patterns.

It has days that no month has, and no names in upper case, no one letter behind a dot of an e-mail
address, not all IPv6 addresses.
"""

_CENTURY = "(?:0[48]|[2468][048]|[13579][26])"  # one of four, or a year of it; 00 is left out
_YEAR = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})"
_LEAP_YEAR = rf"(?:\d\d{_CENTURY}|{_CENTURY}00)"
_DAYS = (
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])",
    r"(?:0[469]|11)-(?:0[1-9]|[12]\d|30)",
    r"02-(?:0[1-9]|1\d|2[0-8])",
)
_DATE = f"(?:{_YEAR}-(?:{'|'.join(_DAYS)})|{_LEAP_YEAR}-02-29)"
_HOUR = r"(?:[01]\d|2[0-3])"
_TIME = rf"{_HOUR}:[0-5]\d:[0-5]\d(?:\.\d{{1,9}})?(?:Z|[+\-]{_HOUR}:[0-5]\d)"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"(?:{_BYTE}\.){{3}}{_BYTE}"
_GROUP = "[0-9A-Fa-f]{1,4}"
_TWO = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"  # what the last 32 bits may be
_LABEL = "[0-9A-Za-z](?:[0-9A-Za-z-]{0,61}[0-9A-Za-z])?"
_LONG_LABEL = _LABEL.replace("{0,61}", "*")  # costs a tenth
_ATOM = "[0-9A-Za-z!#$%&'*+/=?^_`{|}~-]+"


def _up_to(groups: int) -> str:
    """What may stand behind the `::` of an IPv6 address."""
    if groups < 2:
        return f"(?:{_GROUP})?" if groups else ""
    return f"(?:(?:{_GROUP}:){{0,{groups - 2}}}{_TWO}|{_GROUP})?"


def _ipv6() -> str:
    """All eight groups, or some, a `::` for one at least, and others."""
    short = ["::" + _up_to(7)]
    short += [f"{_GROUP}(?::{_GROUP}){{{n - 1}}}::{_up_to(7 - n)}" for n in range(1, 8)]
    return f"(?:(?:{_GROUP}:){{6}}{_TWO}|{'|'.join(short)})"


PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LONG_LABEL}(?:\.{_LONG_LABEL})*",
}
