"""The language a request's text must belong to, as a value, and the one way from it to a Grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import attrs

from ninfer.constraints import direct, gbnf
from ninfer.constraints.breadth import check_breadth
from ninfer.constraints.ir import Grammar
from ninfer.constraints.json_lang import schema_grammar
from ninfer.constraints.limits import MAX_CHOICES, MAX_SOURCE_BYTES, Work
from ninfer.constraints.prune import pruned
from ninfer.constraints.recognise import Machine
from ninfer.constraints.source import text_of
from ninfer.errors import ConstraintLimit, InvalidChoice, InvalidRequest

ConstraintKind = Literal["json_object", "json_schema", "grammar", "regex", "choice"]


@attrs.frozen
class OutputConstraint:
    """A language of texts. Made by one of the class methods; equal when kind and source are equal.

    ``source`` is the text that defines the language, or for a choice the distinct strings, sorted. A finished answer
    under the constraint belongs to the language. Nothing is compiled until the constraint is used; :meth:`check` does
    so without a model and raises what a request would: a :class:`~ninfer.errors.ConstraintError`.
    """

    kind: ConstraintKind
    source: str | tuple[str, ...]

    def __attrs_post_init__(self) -> None:
        expected = tuple if self.kind == "choice" else str
        if self.kind not in ConstraintKind.__args__ or not isinstance(self.source, expected):  # type: ignore[attr-defined]
            raise InvalidRequest(f"{self.kind!r} of {type(self.source).__name__}", field="constraint")
        if isinstance(self.source, str) and len(self.source.encode("utf-8", "surrogatepass")) > MAX_SOURCE_BYTES:
            raise ConstraintLimit(f"the source is longer than {MAX_SOURCE_BYTES} bytes", limit="source bytes")

    @classmethod
    def json_object(cls) -> OutputConstraint:
        """Any JSON object, compact."""
        return cls("json_object", '{"type": "object"}')

    @classmethod
    def json_schema(cls, schema: str | bytes | bool | Mapping[str, Any] | type) -> OutputConstraint:
        """The values of a JSON Schema (draft 2020-12, or draft-07 when it says so), compact, members in declared order.

        ``schema`` is JSON text, a mapping, or a class with ``model_json_schema()`` such as a pydantic model. Text keeps
        its own order and number spelling; a mapping is written in insertion order. Raises InvalidSchema for anything
        else.
        """
        return cls("json_schema", text_of(schema))

    @classmethod
    def grammar(cls, text: str) -> OutputConstraint:
        """The language of a GBNF grammar with the entry rule ``root``."""
        return cls("grammar", text)

    @classmethod
    def regex(cls, pattern: str) -> OutputConstraint:
        """The texts that an ECMAScript regular expression (see :mod:`ninfer.constraints.regex`) matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> OutputConstraint:
        """One of the given strings, exactly. Order and repetition do not matter. Raises InvalidChoice."""
        if isinstance(texts, str) or not isinstance(texts, Sequence):
            raise InvalidChoice(f"expected a sequence of strings, got {type(texts).__name__}")
        if not texts:
            raise InvalidChoice("there is nothing to choose from")
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise InvalidChoice(f"expected a string, got {type(text).__name__}", index=index)
            if any(0xD800 <= ord(c) < 0xE000 for c in text):
                raise InvalidChoice("a surrogate is not a character", index=index)
        distinct = tuple(sorted(set(texts)))
        if len(distinct) > MAX_CHOICES or sum(map(len, distinct)) > MAX_SOURCE_BYTES:
            raise ConstraintLimit(f"more than {MAX_CHOICES} choices or {MAX_SOURCE_BYTES} characters", limit="choices")
        return cls("choice", distinct)

    def accepts(self, text: str | bytes) -> bool:
        """Whether a whole text belongs to the language. Bytes must be UTF-8. Raises like :meth:`check`."""
        return _machine(self).accepts(text)

    def check(self) -> None:
        """Compile the constraint and discard the result. Raises the ConstraintError that a request would raise."""
        language(self)


def language(constraint: OutputConstraint, is_text_token: Callable[[int], bool] | None = None) -> Grammar:
    """The grammar of a constraint, memoised. Every viable prefix of it can be completed.

    ``is_text_token`` says which ids a grammar's ``Token`` and ``ExcludeToken`` may name; without it any may. Raises
    ConstraintError.
    """
    if constraint.kind == "grammar" and is_text_token is not None:
        return _build(constraint, is_text_token)
    return _language(constraint)


@lru_cache(maxsize=4)
def _language(constraint: OutputConstraint) -> Grammar:
    return _build(constraint, None)


@lru_cache(maxsize=4)
def _machine(constraint: OutputConstraint) -> Machine:
    return Machine(language(constraint))


def _build(constraint: OutputConstraint, is_text_token: Callable[[int], bool] | None) -> Grammar:
    work, source = Work(), constraint.source
    if isinstance(source, tuple):
        return direct.choice(source)
    if constraint.kind == "regex":
        grammar = direct.regular(source)
    elif constraint.kind == "grammar":
        grammar = gbnf.parse(source, work, is_text_token=is_text_token)
    else:
        grammar = schema_grammar(source, work)
    grammar = pruned(grammar, work)
    if grammar.free_form:
        check_breadth(grammar, work)
    return grammar
