"""Formats of strings that the compiler takes too widely, as patterns: days that no month has."""

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

PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
}
