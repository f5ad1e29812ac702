"""Bars, callbacks, silence."""

from __future__ import annotations

import sys

import pytest

from ninfer.progress import Meter


def test_a_callback_hears_where_the_work_is():
    heard = []
    with Meter("load", 10, lambda *args: heard.append(args)) as meter:
        meter(4)
        meter(6)
    with Meter("compile", None, lambda *args: heard.append(args), unit="kernel") as meter:
        meter(1)
        meter.reach(3, 7, "name")
    assert heard == [("load", 4, 10), ("load", 10, 10), ("compile", 1, 0), ("compile", 3, 7)]
    assert meter.done == 3


@pytest.mark.parametrize(("progress", "terminal", "shown"), [
    (None, False, False), (None, True, True), (True, False, True), (False, True, False),
])  # fmt: skip
def test_a_bar_shows_where_somebody_looks(progress, terminal, shown, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    with Meter("load", 10, progress, unit="request") as meter:
        meter(5, "7 tok/s")
        meter.reach(10, 20)
    text = capsys.readouterr().err
    assert ("load" in text) is shown
    assert ("7 tok/s" in text and "10/20" in text) is shown


def test_a_short_stage_stays_silent(capsys):
    with Meter("compile", None, True, unit="kernel", delay=60.0) as meter:
        meter.reach(1, 1)
    assert capsys.readouterr().err == ""
