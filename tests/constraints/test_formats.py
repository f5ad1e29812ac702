"""Formats against checkers written from the standards with other means: datetime, ipaddress, uuid, a small parser."""

from __future__ import annotations

import datetime
import ipaddress
import re
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles.json_documents import sample

from ninfer.constraints.automata import Dfa
from ninfer.constraints.formats import FORMATS
from ninfer.constraints.ir import Auto, Grammar
from ninfer.constraints.regex import parse

MACHINES = {name: Dfa.from_regex(parse(pattern), search=True) for name, pattern in FORMATS.items()}


def is_date(text):
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    try:
        datetime.date(*map(int, text.split("-")))
    except ValueError:
        return False
    return True


def is_time(text):
    match = re.fullmatch(r"([0-9]{2}):([0-9]{2}):([0-9]{2})(?:\.[0-9]+)?(?:[zZ]|[+-]([0-9]{2}):([0-9]{2}))", text)
    if not match:
        return False
    hour, minute, second, offset_hour, offset_minute = (int(g or 0) for g in match.groups())
    return max(hour, offset_hour) < 24 and max(minute, offset_minute) < 60 and second < 60


def is_date_time(text):
    return is_date(text[:10]) and text[10:11] in ("T", "t") and is_time(text[11:])


def is_uuid(text):
    return [len(p) for p in text.split("-")] == [8, 4, 4, 4, 12] and set(text) <= set("0123456789abcdefABCDEF-")


def is_ipv4(text):
    parts = text.split(".")
    return len(parts) == 4 and all(p.isascii() and p.isdigit() and str(int(p)) == p and int(p) < 256 for p in parts)


def is_ipv6(text):
    try:
        return "%" not in text and bool(ipaddress.IPv6Address(text))
    except ValueError:
        return False


def is_duration(text):
    """RFC 3339 appendix A: units in order, without a gap inside the date or the time part; weeks alone."""
    if re.fullmatch("P[0-9]+W", text):
        return True
    date, mark, time = text[1:].partition("T")
    for part, units in ((date, "YMD"), (time, "HMS")):
        found = re.findall("([0-9]+)([A-Z])", part)
        names = "".join(unit for _, unit in found)
        if "".join(n + u for n, u in found) != part or names not in units:
            return False
    return text[:1] == "P" and bool(date or time) and bool(time) == bool(mark)


CHECKS = {
    "date": is_date, "time": is_time, "date-time": is_date_time, "uuid": is_uuid, "ipv4": is_ipv4, "ipv6": is_ipv6,
    "duration": is_duration,
}  # fmt: skip
SEEDS = {
    "date": ["2024-02-29", "1900-02-29", "2000-02-29", "0000-01-01", "0400-02-29", "2023-04-31", "9999-12-31"],
    "time": ["23:59:59Z", "00:00:00.5+23:59", "24:00:00Z", "12:30:60Z", "12:30:00", "12:30:00-00:60"],
    "date-time": ["2024-02-29T12:30:00.123Z", "1990-02-31t15:59:59-08:00", "2024-01-01 00:00:00Z"],
    "uuid": ["2eb8aa08-AA98-11ea-b4aa-73b441d16380", "2eb8aa08aa9811eab4aa73b441d16380"],
    "ipv4": ["127.0.0.1", "255.255.255.255", "256.1.1.1", "01.2.3.4", "1.2.3"],
    "ipv6": ["::1", "::", "1:2:3:4:5:6:7:8", "1::8", "::ffff:192.168.0.1", "1:2:3:4:5:6:1.2.3.4", "1:2:3:4:5:6:7::",
             "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9", "::1.2.3", "fe80::1%eth0", "1:2:3:4:5:6:7:1.2.3.4"],
    "duration": ["P4DT12H30M5S", "PT1D", "P1Y2D", "P1YT", "P", "PT0S", "P2W", "P1W2D", "P1M", "PT1H5S", "P1Y2M3DT4H"],
}  # fmt: skip


def test_every_format_has_a_check():
    assert CHECKS.keys() == FORMATS.keys() == SEEDS.keys()


@pytest.mark.parametrize("name", sorted(FORMATS))
@given(data=st.data())
def test_edits_of_examples(name, data):
    machine, check = MACHINES[name], CHECKS[name]
    for text in SEEDS[name]:
        assert machine.accepts(text) == check(text), text
    text = data.draw(st.sampled_from(SEEDS[name]))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        insert = data.draw(st.sampled_from(["", *"0123456789abcDFHMSTZ:.-+ ", "é"]))
        text = text[:at] + insert + text[at + data.draw(st.integers(0, 2)) :]
    assert machine.accepts(text) == check(text), text


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_whatever_is_generated_is_valid(name):
    grammar = Grammar({"root": Auto(MACHINES[name].minimise(), "raw")})
    for seed in range(200):
        text = sample(grammar, Random(seed))
        assert CHECKS[name](text), text


def test_all_days_of_eight_centuries():
    start = datetime.date(1601, 1, 1)
    machine = MACHINES["date"].minimise()
    days = [start + datetime.timedelta(d) for d in range(0, 800 * 365, 97)]
    assert all(machine.accepts(d.isoformat()) for d in days)
    for year in range(1, 10_000, 7):
        assert machine.accepts(f"{year:04}-02-29") == is_date(f"{year:04}-02-29")
