"""Talk without a computed answer: greetings, who the model is, what was said before, counting, little stories."""

from __future__ import annotations

import words
from reasoning import sentence
from turns import Turn
from words import Values

WHO = "I am the tiny ninfer model, a small language model that runs anywhere."
CAN = "I can extract records as JSON, do small sums, rewrite text, look things up in a text and call tools."

_FIXED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "Tell me who you are."), WHO,
     "say who I am"),
    (("What can you do?", "How can you help me?", "Help", "What are you good at?"), CAN, "say what I can do"),
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there", "Hey", "Good morning", "Good evening"), "Hello! How can I help you?",
     "greet back"),
    (("How are you?", "How are you today?", "How do you do?"), "I am fine, thank you. How can I help you?",
     "answer politely"),
    (("Thanks", "Thank you!", "Thank you very much."), "You are welcome!", "answer politely"),
    (("Goodbye", "Bye", "See you later."), "Goodbye!", "say goodbye"),
    (("Are you a human?", "Are you a person?", "Are you real?"), "No, I am a small language model.", "say what I am"),
    (("How big are you?", "How many parameters do you have?"), "I have about eight million parameters.", "say my size"),
    (("Who made you?", "Where do you come from?"), "I was trained for ninfer on synthetic dialogues.",
     "say where I come from"),
    (("Say nothing but OK.", "Answer with OK.", "Say OK."), "OK", "answer OK"),
    (("Say yes.", "Answer with yes."), "yes", "answer yes"),
)  # fmt: skip
_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Be brief.",
    "Answer in one short sentence.",
)


def greeting(v: Values) -> Turn:
    questions, answer, thought = v.any(_FIXED)
    return Turn(v.any(questions), answer, thought)


def system_text(v: Values) -> str:
    """A system text that changes nothing about the answers."""
    return v.any(_SYSTEMS)


def memory(v: Values) -> tuple[Turn, Turn]:
    """Something told, and the question about it that comes later in the same conversation."""
    style = v.number(0, 3)
    if style == 0:
        name = v.name()
        told = v.any((f"My name is {name}.", f"I am {name}.", f"Hi, I am {name}."))
        return Turn(told, f"Nice to meet you, {name}.", "greet"), Turn(
            "What is my name?", f"Your name is {name}.", f"name: {name}"
        )
    if style == 1:
        code = v.code()
        return (
            Turn(f"Remember the code {code}.", "I will remember it.", f"code: {code}"),
            Turn(
                v.any(("What is the code?", "Which code did I give you?")),
                f"The code is {code}.",
                f"code: {code}",
            ),
        )
    if style == 2:
        city = v.city()
        return (
            Turn(f"I live in {city}.", f"{city} is a nice place.", f"city: {city}"),
            Turn("Where do I live?", f"You live in {city}.", f"city: {city}"),
        )
    color = v.pick(words.COLORS)
    return (
        Turn(f"My favorite color is {color}.", f"{color.capitalize()} is a good color.", f"color: {color}"),
        Turn("What is my favorite color?", f"Your favorite color is {color}.", f"color: {color}"),
    )


def counting(v: Values) -> Turn:
    start = v.number(0, 60)
    style = v.number(0, 4)
    if style == 0:
        end = start + v.number(3, 20)
        return Turn(
            f"Count from {start} to {end}.",
            ", ".join(map(str, range(start, end + 1))),
            f"from {start} to {end}",
        )
    if style == 1:
        end = start + v.number(3, 12)
        return Turn(
            f"Count down from {end} to {start}.",
            ", ".join(map(str, range(end, start - 1, -1))),
            f"from {end} to {start}",
        )
    if style == 2:
        step, count = v.number(2, 10), v.number(4, 10)
        shown = ", ".join(str(start + step * i) for i in range(count))
        return Turn(f"Count in steps of {step} from {start}, {count} numbers.", shown, f"add {step} each time")
    if style == 3:
        count = v.number(2, 5)
        text = sentence(v)
        return Turn(
            f"Write this {words.NUMBER_WORDS[count]} times: {text}",
            "\n".join([text] * count),
            f"{count} lines",
        )
    n = v.number(1, 12)
    return Turn(
        f"Write the multiples of {n} up to {n * 10}.",
        ", ".join(str(n * i) for i in range(1, 11)),
        f"table of {n}",
    )


def story(v: Values) -> Turn:
    """A little story about a given hero; its details are free, so this is where sampling shows."""
    hero = words.with_articles(f"a {v.pick(words.ANIMALS)}") if v.coin(0.6) else v.name()
    return Turn(f"Tell me a short story about {hero}.", _story(v, hero), f"a story about {hero}")


def _story(v: Values, hero: str) -> str:
    creature = hero.startswith(("a ", "an "))
    they = f"the {hero.split()[1]}" if creature else hero
    place, thing = v.pick(words.PLACES), v.pick(words.OBJECTS)
    middle = (
        f"One day {they} found a {v.pick(words.COLORS)} {thing} near the {place}.",
        f"Every morning {they} went to the {place} to look for a {thing}.",
        f"A {v.pick(words.ADJECTIVES)} {v.pick(words.ANIMALS)} lived there too, and they became friends.",
        f"They walked to {v.city()} and met {v.name()} the {v.pick(words.JOBS)}.",
        f"It was a {v.pick(words.ADJECTIVES)} day in {v.any(words.MONTHS)}.",
    )
    body = [words.with_articles(text) for text in v.rng.sample(middle, v.number(2, 4))]
    subject = they[0].upper() + they[1:]
    start = f"Once upon a time there was {hero}." if creature else f"{hero} lived near a {place}."
    return " ".join(
        [start, *body, f"{subject} was {v.any(('happy', 'proud', 'tired', 'calm'))} and went home. The end."]
    )


def plain_text(v: Values) -> str:
    """Text outside any conversation, for bare continuation."""
    style = v.number(0, 5)
    if style == 0:
        start = v.number(0, 80)
        return ", ".join(map(str, range(start, start + v.number(5, 30))))
    if style == 1:
        names = v.any((words.DAYS, words.MONTHS))
        start = v.number(0, len(names) - 1)
        return ", ".join(names[(start + i) % len(names)] for i in range(v.number(4, 16)))
    if style == 2:
        start = v.number(0, 20)
        letters = "abcdefghijklmnopqrstuvwxyz"
        return " ".join(letters[start:])
    if style == 3:
        return "\n".join(
            f"{a} + {b} = {a + b}" for a, b in ((v.number(0, 9), v.number(0, 9)) for _ in range(v.number(3, 8)))
        )
    hero = words.with_articles(f"a {v.pick(words.ANIMALS)}") if v.coin(0.5) else v.name()
    return _story(v, hero)
