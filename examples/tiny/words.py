"""Word pools and the draw of values from them.

Training and held-out text never share a name, a city, an object or an invented word: a word belongs to the held-out
eighth or to the training rest by its CRC-32, and a `Values` object draws from one side alone; whole questions are
divided the same way. Small pools (colours, rooms, weekdays) are vocabulary that both sides use.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def _pools() -> dict[str, list[str]]:
    """The word lists of pools.txt: paragraphs that begin with a name and a colon."""
    paragraphs = (Path(__file__).parent / "pools.txt").read_text(encoding="utf-8").split("\n\n")
    return {name: body.split() for name, _, body in (paragraph.partition(":") for paragraph in paragraphs)}


_POOLS = _pools()
NAMES = _POOLS["NAMES"]
SURNAMES = _POOLS["SURNAMES"]
CITIES = _POOLS["CITIES"]
COUNTRIES = _POOLS["COUNTRIES"]
COLORS = _POOLS["COLORS"]
ANIMALS = _POOLS["ANIMALS"]
FRUITS = _POOLS["FRUITS"]
FOODS = _POOLS["FOODS"]
OBJECTS = _POOLS["OBJECTS"]
ROOMS = _POOLS["ROOMS"]
JOBS = _POOLS["JOBS"]
COMPANIES = _POOLS["COMPANIES"]
LANGUAGES = _POOLS["LANGUAGES"]
HOBBIES = _POOLS["HOBBIES"]
VERBS = _POOLS["VERBS"]
ADJECTIVES = _POOLS["ADJECTIVES"]
PLACES = _POOLS["PLACES"]
GENERAL = _POOLS["GENERAL"]
ACCENTED = _POOLS["ACCENTED"]

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
]  # fmt: skip
MONTH_LENGTHS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth"]
NUMBER_WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]

SHOWCASE = frozenset(
    ["Ada", "Bo", "Ben", "Mia", "Novak", "Paris", "Berlin", "London", "Rome", "Tokyo", "Oslo", "17", "25"]
)
"""Words of the examples and guides: texts with them are always on the training side."""

SPLIT_FROM = 60
"""Pools of at least this many words are divided between training and held-out text."""

_ONSETS = list("bcdfghjklmnprstvwz") + ["br", "ch", "dr", "fl", "gr", "kl", "pr", "qu", "sh", "st", "tr"]
_VOWELS = list("aeiouaeio") + ["ai", "ei", "ou"]
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "th", "x", "nd", "ck"]


def with_articles(text: str) -> str:
    """``text`` with every "a" before a vowel made "an"."""
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def listed(items: list[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("x", "s", "sh", "ch")) else "s")


def held_out(key: str) -> bool:
    """Whether the text or number combination named by ``key`` belongs to the held-out side."""
    return key not in SHOWCASE and zlib.crc32(key.encode()) % 8 == 0


_SPLICED = [
    word
    for word in NAMES + SURNAMES + CITIES + COMPANIES + COUNTRIES + OBJECTS + ANIMALS + FOODS + GENERAL + JOBS + ROOMS
    if not held_out(word)
]


class Values:
    """Random values from one side of the split."""

    def __init__(self, rng: random.Random, held: bool = False) -> None:
        self.rng = rng
        self.held = held

    def owns(self, question: str) -> bool:
        """Whether a whole question lies on this side: held-out questions appear nowhere in training."""
        shown = not SHOWCASE.isdisjoint(re.findall(r"\w+", question))
        return (held_out(question) and not shown) == self.held

    def pick(self, pool: Sequence[str]) -> str:
        """One word of the pool. A large pool is split, and now and then an invented word stands in for its words."""
        if len(pool) < SPLIT_FROM:
            return self.rng.choice(pool)
        if self.coin(0.15):
            return self.invented() if pool[0][0].isupper() else self.invented().lower()
        while True:
            word = self.rng.choice(pool)
            if held_out(word) == self.held:
                return word

    def some(self, pool: Sequence[str], count: int) -> list[str]:
        """``count`` different words drawn by `pick`."""
        words: list[str] = []
        while len(words) < count:
            word = self.pick(pool)
            if word not in words:
                words.append(word)
        return words

    def coin(self, probability: float) -> bool:
        return self.rng.random() < probability

    def any(self, pool: Sequence[T]) -> T:
        """A choice that is never split: templates, styles, closed classes such as weekdays."""
        return self.rng.choice(pool)

    def number(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def invented(self) -> str:
        """A made-up capitalised word: two or three syllables, or the start of one real word and the end of another."""
        while True:
            if self.coin(0.4):
                parts = [
                    self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) + self.rng.choice(_CODAS)
                    for _ in range(self.rng.choice((2, 2, 3)))
                ]
            else:
                parts = [
                    self.rng.choice(_SPLICED)[: self.rng.choice((2, 3, 3, 4))],
                    self.rng.choice(_SPLICED)[-self.rng.choice((2, 3, 3, 4)) :],
                ]
            word = "".join(parts).capitalize()
            if held_out(word) == self.held:
                return word

    def name(self) -> str:
        return self.invented() if self.coin(0.25) else self.pick(NAMES)

    def names(self, count: int) -> list[str]:
        found: list[str] = []
        while len(found) < count:
            name = self.name()
            if name not in found:
                found.append(name)
        return found

    def full_name(self) -> str:
        return f"{self.name()} {self.invented() if self.coin(0.25) else self.pick(SURNAMES)}"

    def city(self) -> str:
        return self.invented() if self.coin(0.2) else self.pick(CITIES)

    def company(self) -> str:
        return self.invented() if self.coin(0.3) else self.pick(COMPANIES)

    def date(self) -> str:
        """An ISO date, year 1950 to 2039."""
        month = self.number(1, 12)
        return f"{self.number(1950, 2039)}-{month:02d}-{self.number(1, MONTH_LENGTHS[month - 1]):02d}"

    def time(self) -> str:
        return f"{self.number(0, 23):02d}:{self.any((0, 5, 10, 15, 20, 30, 40, 45, 50)):02d}"

    def price(self) -> float | int:
        """A whole number or one with cents."""
        whole = self.number(1, 200)
        return whole if self.coin(0.3) else round(whole + self.any((0.25, 0.5, 0.75, 0.95, 0.99)), 2)

    def code(self) -> str:
        letters = "".join(self.rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(self.number(1, 3)))
        return f"{letters}-{self.number(10, 9999)}"

    def email(self, name: str) -> str:
        return f"{name.split()[0].lower()}@{self.company().lower()}.{self.any(('com', 'org', 'net', 'io'))}"
