"""The ``format`` values that are enforced, as patterns of the whole string.

``date``, ``time`` and ``date-time`` are those of RFC 3339 (years 0001 to 9999, Gregorian leap years, ``T`` and ``Z`` in
either case) without leap seconds, which few readers take. ``duration`` is RFC 3339 appendix A, ``uuid`` RFC 4122,
``ipv4`` four decimal octets without leading zeros, ``ipv6`` RFC 4291 section 2.2 without a zone.
"""

from __future__ import annotations

_YEAR = "(?:[1-9]\\d{3}|0[1-9]\\d\\d|00[1-9]\\d|000[1-9])"
_LEAP = "(?:\\d\\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)"
    f"|02-(?:0[1-9]|1\\d|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = "(?:[01]\\d|2[0-3]):[0-5]\\d"
_TIME = f"{_CLOCK}:[0-5]\\d(?:\\.\\d+)?(?:[Zz]|[+\\-]{_CLOCK})"
_CLOCK_SPAN = "T(?:\\d+H(?:\\d+M(?:\\d+S)?)?|\\d+M(?:\\d+S)?|\\d+S)"
_DAY_SPAN = "(?:\\d+Y(?:\\d+M(?:\\d+D)?)?|\\d+M(?:\\d+D)?|\\d+D)"
_OCTET = "(?:25[0-5]|2[0-4]\\d|1\\d\\d|[1-9]?\\d)"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"


def _ipv6() -> str:
    """Eight groups, the last two perhaps an IPv4 address, or fewer with ``::`` for at least one group."""
    last = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
    options = [f"(?:{_GROUP}:){{6}}{last}"]
    for before in range(8):
        head = f"(?:{_GROUP}(?::{_GROUP}){{{before - 1}}})" if before else ""
        left = 7 - before  # groups that may follow
        tails = [f"(?:{_GROUP}(?::{_GROUP}){{0,{left - 1}}})?"] if left else [""]
        if left >= 2:
            tails.append(f"(?:{_GROUP}:){{0,{left - 2}}}{_IPV4}")
        options.append(f"{head}::(?:{'|'.join(tails)})")
    return "|".join(options)


FORMATS: dict[str, str] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "duration": f"^P(?:{_DAY_SPAN}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|\\d+W)$",
    "uuid": f"^{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}$",
    "ipv4": f"^{_IPV4}$",
    "ipv6": f"^(?:{_ipv6()})$",
}
"""Format names and their patterns, in the dialect of :mod:`ninfer.constraints.regex`."""
