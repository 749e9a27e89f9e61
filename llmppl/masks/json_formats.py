"""Formats: how dates, times, UUIDs and addresses are written, as regular expressions.

Each holds exactly the texts that Python reads in this form (`date.fromisoformat`, `uuid.UUID`, `ipaddress`), days of
months and leap years included. They are without look-around and captured groups, so that every engine reads them alike.
"""

from __future__ import annotations

__all__ = ["DATE", "DATETIME", "FORMATS", "IPV4", "TIME", "UUID"]

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"       # not 0000
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"       # two digits, a multiple of 4 above 0
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
DATE = f"(?:{_YEAR}-{_DAY}|(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)-02-29)"
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?"
DATETIME = f"{DATE}T{TIME}(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])?"
UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"

FORMATS = {"date": DATE, "time": TIME, "date-time": DATETIME, "uuid": UUID, "ipv4": IPV4}      # by JSON Schema's names
