"""Inputs as values, and the environment variables."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import ninfer
from ninfer import env
from ninfer.inputs import Chat, TokenPrompt

TURN = {"role": "user", "content": "hello"}


def test_a_chat_can_be_used_again_whatever_it_was_made_of():
    chat = Chat((turn for turn in [TURN]), iter([]))
    assert (tuple(chat.messages), tuple(chat.messages)) == ((TURN,), (TURN,))
    assert chat.tools == ()
    ids = TokenPrompt(iter([1, 2]))
    assert ids.ids == (1, 2)


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ("12", "ids"),
        (b"12", "ids"),
        (7, "ids"),
        ({1: 2}, "ids"),
        (np.array(7), "ids"),
        ([1, -1], "ids[1]"),
        ([True], "ids[0]"),
        ([1.0], "ids[0]"),
        (["1"], "ids[0]"),
        (np.array([[1]]), "ids[0]"),
        (np.array([True]), "ids[0]"),
        (np.array([1.0]), "ids[0]"),
    ],
)
def test_what_is_no_token_id_is_named(ids, field):
    with pytest.raises(ninfer.InvalidRequest) as caught:
        TokenPrompt(ids)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"NINFER_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/a/b"),
        ({"NINFER_CACHE_DIR": "~/b", "HOME": "/d"}, "/d/b"),
        ({"XDG_CACHE_HOME": "/c", "HOME": "/d"}, "/c/ninfer"),
        ({"NINFER_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/d"}, "/d/.cache/ninfer"),
        ({"HOME": ""}, "/.cache/ninfer"),
    ],
)
def test_where_kernels_are_kept(monkeypatch, variables, folder):
    for name in ("NINFER_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.cache_dir() == Path(folder)


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it does for a user that the system knows not
    for name in ("NINFER_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert env.cache_dir() == Path("/.cache/ninfer")


@pytest.mark.parametrize(("value", "threads"), [("", None), ("1", 1), (" 2 ", 2), ("1024", 1024)])
def test_threads_of_the_cpu(monkeypatch, value, threads):
    monkeypatch.setenv("NINFER_CPU_THREADS", value)
    assert env.cpu_threads() == threads


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "1025", "9" * 5000])
def test_a_wrong_number_of_threads_names_the_variable(monkeypatch, value):
    monkeypatch.setenv("NINFER_CPU_THREADS", value)
    with pytest.raises(ninfer.InvalidRequest) as caught:
        env.cpu_threads()
    assert caught.value.field == "NINFER_CPU_THREADS"
