"""Tasks with one right answer: arithmetic with its steps, look-ups in a given text, dates, lists, rewriting."""

from __future__ import annotations

import words
from turns import Turn
from words import Values, held_out, listed

# --- arithmetic -------------------------------------------------------------------------------------------------


def _operands(v: Values, op: str) -> tuple[int, int]:
    """Two operands whose combination lies on the side of ``v``. Tables and the smallest sums are training only."""
    while True:
        if op in "+-":
            top = v.any((20, 99, 99, 99, 999, 999))
            a, b = v.number(0, top), v.number(0, v.any((top, 99)))
            if op == "-" and b > a:
                a, b = b, a
            known = max(a, b) < 10 or (a, b) == (17, 25)
        else:
            a, b = v.number(0, v.any((12, 99))), v.number(0, 9 if v.coin(0.7) else 12)
            known = a <= 12
            b = b if known else min(b, 9)
        low, high = sorted((a, b))
        if (not known and held_out(f"{low}{op}{high}")) == v.held:
            return a, b


def _column_steps(a: int, b: int, op: str) -> str:
    """Addition or subtraction digit by digit from the right, one step a line."""
    width = max(len(str(a)), len(str(b)))
    steps, carry = [], 0
    for x, y in zip(reversed(str(a).zfill(width)), reversed(str(b).zfill(width)), strict=True):
        left, right = int(x), int(y)
        extra = f" {op} 1" if carry else ""
        if op == "+":
            total = left + right + carry
            carry = total // 10
            steps.append(f"{left} + {right}{extra} = {total}, digit {total % 10}, carry {carry}")
        else:
            total = left - right - carry
            carry = int(total < 0)
            steps.append(f"{left} - {right}{extra} = {total}, digit {total % 10}, borrow {carry}")
    result = a + b if op == "+" else a - b
    return "\n".join([*steps, f"{a} {op} {b} = {result}"])


def _product_steps(a: int, b: int) -> str:
    """Tens and ones apart."""
    tens, ones = a // 10 * 10, a % 10
    if a <= 12 or not ones:
        return f"{a} * {b} = {a * b}"
    parts = f"{tens} * {b} = {tens * b}\n{ones} * {b} = {ones * b}\n{tens * b} + {ones * b} = {a * b}"
    return f"{parts}\n{a} * {b} = {a * b}"


def _equation(a: int, b: int, op: str) -> str:
    """The answer as an equation; a product beyond the tables shows its parts."""
    if op == "*" and a > 12 and a % 10:
        return f"{a} * {b} = {a // 10 * 10 * b} + {a % 10 * b} = {a * b}"
    return f"{a} {op} {b} = {_RESULT[op](a, b)}"


_RESULT = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
_ASK = {
    "+": ("What is {a} + {b}?", "What is {a}+{b}?", "Calculate {a} + {b}.", "How much is {a} plus {b}?",
        "Add {a} and {b}.",
          "What is the sum of {a} and {b}?"),
    "-": ("What is {a} - {b}?", "What is {a}-{b}?", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
          "Subtract {b} from {a}."),
    "*": ("What is {a} * {b}?", "Calculate {a} * {b}.", "How much is {a} times {b}?", "Multiply {a} by {b}.",
          "What is {a} x {b}?"),
}  # fmt: skip
_BARE = (
    "{a} {op} {b} = ?",
    "{a} {op} {b}",
    "What is {a} {op} {b}? Answer with the number only.",
    "Compute {a}{op}{b}.",
)
_STORIES = {
    "+": ("{n} has {a} {things} and gets {b} more. How many {things} does {n} have?",
          "There are {a} {things} in a box. {n} adds {b} {things}. How many {things} are in the box?"),
    "-": ("{n} has {a} {things} and gives {b} away. How many {things} does {n} have?",
          "There are {a} {things} in a box. {n} takes {b} {things} out. How many {things} are in the box?"),
    "*": ("{n} has {a} bags with {b} {things} each. How many {things} does {n} have?",
          "There are {a} boxes with {b} {things} each. How many {things} does {n} count?"),
}  # fmt: skip


def arithmetic(v: Values) -> Turn:
    """A sum, difference or product, answered as an equation or as the bare number."""
    op = v.any("++++--**")
    a, b = _operands(v, op)
    result = _RESULT[op](a, b)
    thought = _product_steps(a, b) if op == "*" else _column_steps(a, b, op)
    style = v.number(0, 9)
    if style < 6:
        return Turn(v.any(_ASK[op]).format(a=a, b=b), _equation(a, b, op), thought)
    if style < 8 and (op != "*" or a <= 12):
        return Turn(v.any(_BARE).format(a=a, b=b, op=op), str(result), thought)
    n, things = v.name(), words.plural(v.pick(words.OBJECTS))
    user = v.any(_STORIES[op]).format(n=n, a=a, b=b, things=things)
    return Turn(user, f"{_equation(a, b, op)}, so the answer is {result} {things}.", thought)


def long_sum(v: Values) -> Turn:
    numbers = [v.number(1, 40) for _ in range(v.number(3, 4))]
    total, lines = numbers[0], []
    for n in numbers[1:]:
        lines.append(f"{total} + {n} = {total + n}")
        total += n
    shown = " + ".join(map(str, numbers))
    return Turn(f"What is {shown}?", f"{shown} = {total}", "\n".join(lines))


def compare(v: Values) -> Turn:
    a, b = v.number(0, 999), v.number(0, 999)
    if a == b:
        b += 1
    style = v.number(0, 3)
    if style == 0:
        return Turn(f"Which is larger, {a} or {b}?", f"{max(a, b)} is larger.", f"compare {a} and {b}")
    if style == 1:
        return Turn(f"Which is smaller, {a} or {b}?", f"{min(a, b)} is smaller.", f"compare {a} and {b}")
    if style == 2:
        word = "even" if a % 2 == 0 else "odd"
        return Turn(f"Is {a} even or odd?", f"{a} is {word}.", f"the last digit is {a % 10}")
    return Turn(f"Is {a} greater than {b}?", "Yes." if a > b else "No.", f"compare {a} and {b}")


# --- look-ups ---------------------------------------------------------------------------------------------------


def _who_is_where(v: Values) -> Turn:
    people = v.names(v.number(2, 4))
    where: dict[str, str] = {}
    lines = []
    for person in people:
        where[person] = v.pick(words.ROOMS)
        lines.append(f"{person} {v.any(('is', 'is', 'sits', 'waits'))} in the {where[person]}.")
    for _ in range(v.any((0, 0, 1, 2))):
        person = v.any(people)
        where[person] = v.pick(words.ROOMS)
        lines.append(f"{person} {v.any(('goes', 'walks', 'moves'))} to the {where[person]}.")
    text = " ".join(lines)
    style = v.number(0, 9)
    if style < 7:
        person = v.any(people)
        if v.coin(0.15):
            return Turn(
                f"Where is {person}?",
                f"{person} is in the {where[person]}.",
                f"{person}: {where[person]}",
                text,
            )
        return Turn(
            v.any((f"{text} Where is {person}?", f"{text}\nWhere is {person}?",
                f"Context: {text}\nQuestion: Where is {person}?")),
            f"{person} is in the {where[person]}.",
            f"{person}: {where[person]}",
        )  # fmt: skip
    if style == 7:
        stranger = next(n for n in iter(v.name, "") if n not in where)
        return Turn(
            f"{text} Where is {stranger}?",
            f"The text does not say where {stranger} is.",
            f"{stranger}: unknown",
        )
    room = v.any(list(where.values()))
    here = [p for p in people if where[p] == room]
    verb = "is" if len(here) == 1 else "are"
    return Turn(
        f"{text}\nWho is in the {room}?",
        f"{listed(here)} {verb} in the {room}.",
        f"{room}: {', '.join(here)}",
    )


def _who_has_what(v: Values) -> Turn:
    people = v.names(v.number(2, 4))
    things = v.some(words.OBJECTS, len(people))
    text = " ".join(f"{p} has the {t}." for p, t in zip(people, things, strict=True))
    i = v.number(0, len(people) - 1)
    if v.coin(0.5):
        return Turn(
            f"{text} What does {people[i]} have?",
            f"{people[i]} has the {things[i]}.",
            f"{people[i]}: {things[i]}",
        )
    return Turn(f"{text} Who has the {things[i]}?", f"{people[i]} has the {things[i]}.", f"{things[i]}: {people[i]}")


def _table(v: Values) -> Turn:
    keys = v.names(v.number(3, 6)) if v.coin(0.5) else v.some(words.OBJECTS, v.number(3, 6))
    draw = v.any((lambda: str(v.number(1, 9999)), lambda: v.pick(words.COLORS), v.code, v.city))
    table = {key: draw() for key in keys}
    text = "\n".join(f"{key}: {value}" for key, value in table.items())
    key = v.any(keys)
    user = v.any((f"{text}\n\nWhat is the value of {key}?", f"Look up {key} in this table.\n{text}"))
    return Turn(user, f"{key}: {table[key]}", f"find {key}")


def _fact(v: Values) -> Turn:
    person = v.full_name()
    facts = {
        "lives": (f"{person} lives in {(city := v.city())}.", f"Where does {person} live?",
            f"{person} lives in {city}."),
        "works": (f"{person} works for {(firm := v.company())}.", f"Who does {person} work for?",
            f"{person} works for {firm}."),
        "likes": (f"{person} likes {(hobby := v.pick(words.HOBBIES))}.", f"What does {person} like?",
            f"{person} likes {hobby}."),
        "was": (f"{person} was born in {(year := v.number(1900, 2020))}.", f"When was {person} born?",
                f"{person} was born in {year}."),
    }  # fmt: skip
    picked = v.rng.sample(list(facts), v.number(2, 4))
    _, question, answer = facts[v.any(picked)]
    text = " ".join(facts[key][0] for key in picked)
    return Turn(v.any((f"{text} {question}", f"{text}\n\n{question}")), answer, f"The text says it: {answer[:-1]}")


def lookup(v: Values) -> Turn:
    """A question whose answer stands in the text before it."""
    return v.any((_who_is_where, _who_is_where, _who_has_what, _table, _fact))(v)


# --- dates and lists --------------------------------------------------------------------------------------------


def dates(v: Values) -> Turn:
    style = v.number(0, 6)
    day, month = v.number(0, 6), v.number(0, 11)
    names, i, size = (words.DAYS, day, 7) if v.coin(0.5) else (words.MONTHS, month, 12)
    unit = "day" if size == 7 else "month"
    if style == 0:
        return Turn(
            f"Which {unit} comes after {names[i]}?",
            f"{names[(i + 1) % size]} comes after {names[i]}.",
            f"after {names[i]}",
        )
    if style == 1:
        return Turn(
            f"Which {unit} comes before {names[i]}?",
            f"{names[(i - 1) % size]} comes before {names[i]}.",
            f"before {names[i]}",
        )
    if style == 2:
        count = v.number(2, 6)
        walk = "\n".join(f"{k}: {words.DAYS[(day + k) % 7]}" for k in range(count + 1))
        return Turn(
            f"Today is {words.DAYS[day]}. Which day is it in {count} days?",
            f"In {count} days it is {words.DAYS[(day + count) % 7]}.",
            walk,
        )
    if style == 3:
        length = words.MONTH_LENGTHS[month]
        name = words.MONTHS[month]
        note = " (29 in a leap year)" if month == 1 else ""
        return Turn(
            f"How many days does {name} have?",
            f"{name} has {length} days{note}.",
            f"{name} is month {month + 1}",
        )
    year, number = v.number(1950, 2039), v.number(1, words.MONTH_LENGTHS[month])
    iso, spoken = f"{year}-{month + 1:02d}-{number:02d}", f"{number} {words.MONTHS[month]} {year}"
    if style == 4:
        return Turn(f"Write {spoken} as an ISO date.", iso, f"{words.MONTHS[month]} is month {month + 1}")
    if style == 5:
        return Turn(f"Write the date {iso} in words.", spoken, f"month {month + 1} is {words.MONTHS[month]}")
    following = number + 1, month, year
    if number == words.MONTH_LENGTHS[month]:
        following = 1, (month + 1) % 12, year + (month == 11)
    if month == 1 and number == 28:
        return dates(v)
    d, m, y = following
    return Turn(
        f"Which date comes after {iso}?",
        f"{y}-{m + 1:02d}-{d:02d}",
        f"{words.MONTHS[month]} has {words.MONTH_LENGTHS[month]} days",
    )


def lists(v: Values) -> Turn:
    if v.coin(0.4):
        numbers = [v.number(0, 99) for _ in range(v.number(3, 6))]
        shown = ", ".join(map(str, numbers))
        style = v.number(0, 3)
        if style == 0:
            return Turn(f"What is the largest number in {shown}?", str(max(numbers)), f"compare {shown}")
        if style == 1:
            return Turn(f"What is the smallest number in {shown}?", str(min(numbers)), f"compare {shown}")
        down = style == 3
        ordered = ", ".join(map(str, sorted(numbers, reverse=down)))
        return Turn(
            f"Sort these numbers{' from high to low' if down else ''}: {shown}",
            ordered,
            f"{len(numbers)} numbers",
        )
    pool = v.any((words.FRUITS, words.ANIMALS, words.OBJECTS, words.FOODS, words.COLORS, words.GENERAL))
    items = v.some(pool, v.number(3, 6))
    shown = ", ".join(items)
    style = v.number(0, 6)
    if style == 0:
        counting = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
        return Turn(f"How many items are in this list: {shown}?", f"There are {len(items)} items.", counting)
    if style == 1:
        i = v.number(0, len(items) - 1)
        counting = "\n".join(f"{k}. {item}" for k, item in enumerate(items[: i + 1], 1))
        return Turn(f"What is the {words.ORDINALS[i]} item in this list: {shown}?", items[i], counting)
    if style == 2:
        item = v.any(items) if v.coin(0.5) else v.pick(pool)
        answer = f"Yes, {item} is in the list." if item in items else f"No, {item} is not in the list."
        return Turn(f"Is {item} in this list: {shown}?", answer, f"look for {item}")
    if style == 3:
        return Turn(f"Sort these words: {shown}", ", ".join(sorted(items)), " ".join(sorted(w[0] for w in items)))
    if style == 4:
        return Turn(
            f"Write this list as bullet points: {shown}",
            "\n".join(f"- {item}" for item in items),
            "one line each",
        )
    if style == 5:
        return Turn(
            f"Write this list as a JSON array: {shown}",
            "[" + ",".join(f'"{item}"' for item in items) + "]",
            "array",
        )
    return Turn(f"What is the last item in this list: {shown}?", items[-1], f"the list ends with {items[-1]}")


# --- rewriting --------------------------------------------------------------------------------------------------


def sentence(v: Values) -> str:
    return words.with_articles(v.any((
        f"the {v.pick(words.ADJECTIVES)} {v.pick(words.ANIMALS)} {v.pick(words.VERBS)} near the {v.pick(words.PLACES)}",
        f"{v.name()} {v.pick(words.VERBS)} in the {v.pick(words.ROOMS)}",
        f"the {v.pick(words.OBJECTS)} is {v.pick(words.ADJECTIVES)} and {v.pick(words.COLORS)}",
        f"{v.name()} bought a {v.pick(words.COLORS)} {v.pick(words.OBJECTS)} in {v.city()}",
        " ".join(v.some(words.GENERAL, v.number(2, 5))),
    )))  # fmt: skip


def rewrite(v: Values) -> Turn:
    text = sentence(v)
    parts = text.split()
    style = v.number(0, 10)
    if style == 0:
        return Turn(f"Write in upper case: {text}", text.upper(), "every letter in upper case")
    if style == 1:
        return Turn(f"Write in lower case: {text.upper()}", text.lower(), "every letter in lower case")
    if style in (2, 3):
        counting = "\n".join(f"{i}. {word}" for i, word in enumerate(reversed(parts), 1))
        return Turn(f"Reverse the order of the words: {text}", " ".join(reversed(parts)), counting)
    if style == 4:
        old, new = v.any(parts), v.pick(words.GENERAL)
        replaced = " ".join(new if word == old else word for word in parts)
        return Turn(f'Replace "{old}" with "{new}": {text}', replaced, f"{old} becomes {new}")
    if style == 5:
        counting = "\n".join(f"{i}. {word}" for i, word in enumerate(parts, 1))
        return Turn(f"How many words are in this sentence: {text}", f"There are {len(parts)} words.", counting)
    if style == 6:
        return Turn(f"Repeat after me: {text}", text, "the same text again")
    if style == 7:
        which, word = v.any((("first", parts[0]), ("last", parts[-1])))
        return Turn(f"What is the {which} word of this sentence: {text}", word, f"the {which} word")
    if style == 8:
        mark, name = v.any((("-", "hyphens"), ("_", "underscores"), (", ", "commas"), (" / ", "slashes")))
        return Turn(f"Join the words with {name}: {text}", mark.join(parts), f"put {name} between the words")
    if style == 9:
        word = v.pick(v.any((words.GENERAL, words.ANIMALS, words.FRUITS, words.OBJECTS)))
        return Turn(f"Spell the word {word}.", "-".join(word), f"{len(word)} letters")
    line = " ".join(v.any(words.ACCENTED) for _ in range(v.number(1, 4)))
    return Turn(f"Repeat after me: {line}", line, "the same text again")
