"""Extraction tasks: a sentence or two that describe a record, and the same record as compact JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from records import KINDS
from turns import Turn
from words import Values, listed, with_articles

_FLAGS = {"in_stock": ("in stock", "sold out"), "done": ("done", "open")}

_AFTER = (
    "Extract {keys} as JSON.\n{text}",
    "Extract the {keys} from this text as JSON:\n{text}",
    "Read the text and answer with a JSON object with the keys {keys}.\nText: {text}",
    "JSON keys: {keys}\nText: {text}",
    "Extract a record with {keys} as JSON: {text}",
)
_BEFORE = (
    "{text}\nReturn the {keys} as JSON.",
    "{text}\n\nExtract {keys} as JSON.",
    "{text} Give me the {keys} as a JSON object.",
)
_WHOLE = (
    "Extract the {kind} as JSON.\n{text}",
    "Extract the {kind} record as JSON: {text}",
    "Turn this {kind} into JSON: {text}",
    "{text}\nWrite the {kind} as JSON.",
)
_PAIRS = (
    "Extract the record as JSON: {text}",
    "Extract the record as JSON:\n{text}",
    "Convert to JSON: {text}",
    "Extract the {kind} as JSON: {text}",
    "{text}\nReturn this record as JSON.",
)
_SYSTEM = (
    "Extract {keys} from the text of the user. Answer with JSON only.",
    "You turn text into JSON with the keys {keys}.",
)
_NOISE = (
    "Hello!",
    "Thank you.",
    "Please note:",
    "Good news.",
    "It was a sunny day.",
    "See you soon.",
    "Best wishes.",
)


def compact(value: Any) -> str:
    """JSON with no white space, non-ASCII text as it is."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _spoken(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return _FLAGS[key][0 if value else 1]
    return listed(value) if isinstance(value, list) else str(value)


def _labelled(v: Values, kind: str) -> tuple[dict[str, Any], str]:
    """A record as "Label: value" pairs instead of sentences."""
    fields = KINDS[kind][0]
    keys = v.rng.sample(list(fields), v.number(2, len(fields)))
    if v.coin(0.7):
        keys.sort(key=list(fields).index)
    record = {key: fields[key](v) for key in keys}
    pairs = [f"{key.replace('_', ' ').capitalize()}: {_spoken(key, value)}" for key, value in record.items()]
    joint, end = v.any(((", ", "."), (", ", ""), ("\n", ""), ("; ", "")))
    return record, joint.join(pairs) + end


def _record(v: Values, kind: str) -> tuple[dict[str, Any], str]:
    fields, texts = KINDS[kind]
    text = v.any(texts)
    record = {key: draw(v) for key, draw in fields.items() if f"{{{key}}}" in text}
    text = with_articles(text.format_map({key: _spoken(key, value) for key, value in record.items()}))
    return record, text[0].upper() + text[1:] if v.coin(0.5) else text


def _thought(answer: Mapping[str, Any]) -> str:
    return "\n".join(f"{key}: {'missing' if value is None else _spoken(key, value)}" for key, value in answer.items())


def extract(v: Values) -> Turn:
    """One record; some or all of its fields are asked for."""
    kind = v.any(list(KINDS))
    labelled = v.coin(0.15)
    record, text = _labelled(v, kind) if labelled else _record(v, kind)
    if labelled and v.coin(0.6):
        return Turn(v.any(_PAIRS).format(kind=kind, text=text), compact(record), _thought(record))
    if v.coin(0.15):
        text = f"{v.any(_NOISE)} {text}"
    if v.coin(0.15):
        text = f"{text} {v.any(_NOISE)}"
    if v.coin(0.25):
        return Turn(v.any(_WHOLE).format(kind=kind, text=text), compact(record), _thought(record))
    keys = list(record)
    if v.coin(0.6):
        keys = keys[: v.number(1, len(keys))]
    if v.coin(0.4):
        v.rng.shuffle(keys)
    if keys == [kind]:  # "the invoice" would mean the number or the whole record
        keys = list(record)
    answer = {key: record[key] for key in keys}
    note = ""
    if v.coin(0.15):
        other = v.any([key for fields, _ in KINDS.values() for key in fields if key not in record])
        keys.insert(v.number(0, len(keys)), other)
        answer = {key: record.get(key) for key in keys}
        note = " Use null for what is missing."
    asked = listed(keys)
    style = v.number(0, 9)
    if style < 5:
        user = v.any(_AFTER).format(keys=asked, text=text + note)
    elif style < 8:
        user = v.any(_BEFORE).format(keys=asked, text=text) + note
    else:
        return Turn(text, compact(answer), _thought(answer), system=v.any(_SYSTEM).format(keys=asked) + note)
    return Turn(user, compact(answer), _thought(answer))


def extract_many(v: Values) -> Turn:
    """Two to four records of one kind as an array."""
    kind = v.any(("person", "pet", "product", "place", "order", "employee"))
    records = [_record(v, kind) for _ in range(v.number(2, 4))]
    keys = [key for key in KINDS[kind][0] if all(key in record for record, _ in records)][: v.number(2, 3)]
    answer = [{key: record[key] for key in keys} for record, _ in records]
    text = " ".join(text for _, text in records)
    user = v.any((
        "Extract a JSON array with {keys} of every {kind}.\n{text}",
        "{text}\nList {keys} of every {kind} as a JSON array.",
    )).format(keys=listed(keys), kind=kind, text=text)  # fmt: skip
    thought = "\n".join(f"{i}. {', '.join(_spoken(k, x) for k, x in a.items())}" for i, a in enumerate(answer, 1))
    return Turn(user, compact(answer), thought)
