"""The field tables as Markdown, for docs/serving.md: ``python -m ninfer.gateway.http.reference`` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from ninfer.gateway.http import chat_completions, messages, responses
from ninfer.gateway.http.shapes import (
    Either,
    Field,
    Flag,
    Integer,
    Labels,
    Many,
    Real,
    Record,
    Shape,
    Tagged,
    Text,
)
from ninfer.gateway.http.sse import dumps

TABLES = {
    "Chat Completions: `POST /v1/chat/completions`": chat_completions.FIELDS,
    "Responses: `POST /v1/responses`": responses.FIELDS,
    "Messages: `POST /v1/messages`": messages.FIELDS,
    "Messages: `POST /v1/messages/count_tokens`": messages.COUNT_FIELDS,
}


def tables() -> str:
    """A section for each protocol, one row for each field at any depth."""
    sections = []
    for title, record in TABLES.items():
        rows = "\n".join(f"| `{path}` | {status} | {doc} |" for path, status, doc in _rows(record, ""))
        sections.append(f"### {title}\n\n| field | | |\n|---|---|---|\n{rows}\n")
    return "\n".join(sections)


def _rows(record: Record, path: str) -> Iterator[tuple[str, str, str]]:
    for known in record.fields:
        here = f"{path}.{known.name}" if path else known.name
        yield here, _status(known), known.doc
        if known.shape is not None and known.use == "read":
            yield from _inside(known.shape, here)


def _inside(shape: Shape, path: str) -> Iterator[tuple[str, str, str]]:
    """The rows of what an array or object holds. An object that comes in kinds shows its kind in braces."""
    if isinstance(shape, Many):
        yield from _inside(shape.item, f"{path}[]")
    elif isinstance(shape, Either):
        for part in (shape.array, shape.record):
            if part is not None:
                yield from _inside(part, path)
    elif isinstance(shape, Record):
        yield from _rows(shape, path)
    elif isinstance(shape, Tagged):
        kinds = ", ".join(f"`{kind}`" for kind in shape.records)
        absent = f"; {shape.absent} when absent" if shape.absent else ""
        yield f"{path}.{shape.tag}", f"supported: {kinds}", f"the kind{absent}; others are refused"
        for record in dict.fromkeys(map(id, shape.records.values())):
            same = [kind for kind, known in shape.records.items() if id(known) == record]
            place = f"{path}{{{','.join(same)}}}" if len(same) < len(shape.records) else path
            yield from _rows(shape.records[same[0]], place)


def _status(known: Field) -> str:
    if known.use == "refused":
        return "**refused**"
    if known.use == "fixed":
        return "only " + ", ".join(f"`{dumps(value)}`" for value in known.values)
    kind = "" if known.shape is None else _kind(known.shape)
    needed = ", required" if known.required else ""
    return f"no effect ({kind})" if known.use == "neutral" else f"supported ({kind}{needed})"


def _kind(shape: Shape) -> str:
    if isinstance(shape, Text):
        return ", ".join(f"`{value}`" for value in shape.values) or "string"
    if isinstance(shape, Integer):
        return f"integer {shape.low}..{shape.high}"
    if isinstance(shape, Real):
        return f"number {'(' if shape.open else '['}{shape.low:g}, {shape.high:g}]"
    if isinstance(shape, Flag):
        return "bool"
    if isinstance(shape, Many):
        limit = f" of at most {shape.high}" if shape.high is not None else ""
        return f"array{limit}"
    if isinstance(shape, Either):
        parts = (shape.text, shape.array, shape.record)
        return " or ".join(_kind(part) for part in parts if part is not None)
    return "object of strings" if isinstance(shape, Labels) else "object"


if __name__ == "__main__":
    print(tables())
