"""The matcher's transactions: what is tried leaves no trace, what is committed stays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.ir import Grammar, NotTok, seq
from ninfer.constraints.masks import batch_masks
from ninfer.constraints.matcher import rest_of_character
from ninfer.constraints.service import ConstraintService, LanguagePlan
from ninfer.errors import ConstraintError, ConstraintPrefix, InvariantError

STOP, MARKER = 256, 257
CONSTRAINTS = [
    OutputConstraint.json_schema({"type": "object", "properties": {"a": {"type": "string", "maxLength": 3}}}),
    OutputConstraint.grammar('root ::= "(" root ")" | [a-z]{1,3} | root "+" root'),
    OutputConstraint.choice(["a", "ab", "abc", "b中"]),
    OutputConstraint.regex("(?:ab|c){1,4}"),
]


@pytest.fixture(scope="module")
def service(small_index):
    return ConstraintService(small_index.classes, 1 << 24, timed=True)


def matcher(service, constraint, prefix=b""):
    plan = LanguagePlan(constraint.kind, constraint, lambda: language(constraint))
    return service.open(plan, prefix).matcher


def raw(service, body):
    """A matcher of a caller's own rule."""
    return service.open(LanguagePlan("grammar", object(), lambda: Grammar({"root": body}, free_form=True))).matcher


def masks(m, drafts=()):
    slots = np.full((1 + len(drafts), m._index.words), 0xFFFFFFFF, np.uint32)
    return slots, m.lookahead(drafts, slots)


def ids(mask):
    return {int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))}


def legal(m):
    return ids(masks(m)[0][0])


@given(data=st.data(), constraint=st.sampled_from(CONSTRAINTS))
def test_what_is_tried_leaves_no_trace(service, data, constraint):
    m, twin = matcher(service, constraint), matcher(service, constraint)
    for _ in range(8):
        before = legal(m)
        assert before == legal(twin)
        assert (STOP in before) == m.complete
        drafts = data.draw(st.lists(st.sampled_from([*sorted(before), 0x61, 0x28, STOP, 258]), max_size=4))
        masks(m, drafts)
        assert legal(m) == before
        token = data.draw(st.sampled_from(sorted(before)))
        m.preview([token])
        m.discard()
        assert legal(m) == before
        with pytest.raises(InvariantError):
            m.preview([token, 258])
        assert legal(m) == before
        m.preview([token])
        m.commit()
        twin.preview([token])
        twin.commit()
        assert (m.complete, m.terminated, m.steps) == (twin.complete, twin.terminated, twin.steps)
        if m.terminated:
            assert token == STOP
            return


def test_lookahead_behind_drafts(service):
    m = matcher(service, OutputConstraint.regex("(?:ab|c){1,4}"))
    a, b, c = map(ord, "abc")
    slots, row = masks(m, [a, b, c])
    assert ids(slots[0]) >= {a, c}
    assert ids(slots[1]) & {a, b, c} == {b}
    assert (row.extent, row.dead, row.unreachable_from) == (4, 0, None)
    # The mask that rejects an illegal draft is ready; nothing behind it is reached.
    slots, row = masks(m, [a, a, b])
    assert b in ids(slots[1])
    assert (row.dead, row.unreachable_from) == (0, 2)
    assert ids(slots[2]) == ids(slots[3]) == {STOP}
    # Behind the end nothing is reached.
    slots, row = masks(m, [c, STOP, c])
    assert STOP in ids(slots[1])
    assert row.unreachable_from == 2


def test_a_dead_end_behind_a_draft_is_marked(service, small_index):
    every = tuple(int(i) for i in np.flatnonzero(small_index.classes.text))
    m = raw(service, seq("a", NotTok(every)))
    slots, row = masks(m, [ord("a"), ord("b")])
    assert ids(slots[0]) == {ord("a")}
    assert (row.dead, row.unreachable_from) == (0b10, 2)
    assert ids(slots[1]) == {STOP}, "a safe placeholder"
    m.preview([ord("a")])
    m.commit()
    assert masks(m)[1].dead == 1


def test_a_start_without_tokens_is_refused(service, small_index):
    every = tuple(int(i) for i in np.flatnonzero(small_index.classes.text))
    with pytest.raises(ConstraintError) as caught:
        raw(service, NotTok(every))
    assert caught.value.kind == "dead_start"


def test_tail_bits_are_clear(service, small_index):
    assert small_index.size % 32
    for constraint in CONSTRAINTS:
        slots, _ = masks(matcher(service, constraint))
        assert max(ids(slots[0])) < small_index.size


def test_order_of_calls(service):
    m = matcher(service, CONSTRAINTS[2])
    for wrong in (m.commit, m.discard):
        with pytest.raises(InvariantError):
            wrong()
    m.preview([ord("a")])
    for wrong in (lambda: m.preview([ord("b")]), lambda: masks(m)):
        with pytest.raises(InvariantError):
            wrong()
    m.commit()
    m.preview([STOP])
    m.commit()
    assert m.terminated
    assert m.complete
    for wrong in (lambda: m.preview([ord("b")]), lambda: masks(m)):
        with pytest.raises(InvariantError):
            wrong()


def test_prefixes(service):
    schema = OutputConstraint.json_schema({"type": "object", "properties": {"name": {}}, "required": ["name"],
                                           "additionalProperties": False})  # fmt: skip
    m = matcher(service, schema, b'{"name":1}')
    assert m.complete
    assert m.steps == 0
    with pytest.raises(ConstraintPrefix) as caught:
        matcher(service, schema, b'{"nam3')
    assert caught.value.offset == 5


def test_forced_tokens_finish_a_broken_character(service):
    m = matcher(service, OutputConstraint.grammar('root ::= [^x]* "\\n" "y"'))
    first = "中".encode()[:2]
    m.preview(list(first))
    m.commit()
    with pytest.raises(InvariantError):
        m.preview([ord("\n")])
    m.preview_control([ord("\n")], first)
    m.discard()
    m.preview_control([ord("\n")], first)
    m.commit()
    assert ord("y") in legal(m)


@given(st.characters(exclude_categories=["Cs"]))
def test_rest_of_character(char):
    data = char.encode()
    assert rest_of_character(b"ab" + data) == b""
    for cut in range(1, len(data)):
        for before in (b"", b"a", "é".encode()):
            assert len((data[:cut] + rest_of_character(before + data[:cut])).decode()) == 1


def test_counters(service):
    m = matcher(service, CONSTRAINTS[0])
    assert m.masks == 1
    masks(m, [ord("{"), ord('"')])
    assert m.masks == 4, "undone work is counted"
    assert m.mask_seconds > 0


def test_a_free_batch_has_no_provider(service):
    assert batch_masks([None, None]) is None
    m = matcher(service, CONSTRAINTS[0])
    provider = batch_masks([None, m, None])
    assert list(provider.constrained_rows()) == [1]
    slots = np.zeros((1, m._index.words), np.uint32)
    assert provider.fill(1, (), slots).extent == 1
    assert ids(slots[0]) == legal(m)
