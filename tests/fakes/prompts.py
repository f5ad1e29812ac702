"""Prompts for the scripted program, whose first token names where the answer ends."""

from __future__ import annotations

from ninfer import Chat, TokenPrompt


def endless(length: int = 5) -> TokenPrompt:
    """The answer has no EOS within any budget here."""
    return TokenPrompt([255] + [9] * (length - 1))


def ends_at(index: int, length: int = 5) -> TokenPrompt:
    """Output token ``index`` is EOS."""
    return TokenPrompt([index] + [9] * (length - 1))


def thinking() -> Chat:
    """Starts in the thinking channel and never leaves it on its own."""
    return Chat([{"role": "user", "content": "\xffabc"}], thinking=True)
