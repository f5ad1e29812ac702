"""Drafts of constrained answers, across the close of the thinking and the opening of calls.

The masks behind drafts are those that one token after the other meets, and rounds of any size, tried, forgotten and
tried again, come to the same answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ninfer.constraints import OutputConstraint
from ninfer.errors import InvariantError
from ninfer.frontend import Frontend, OutputSession
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.inputs import Chat, Tool
from ninfer.options import RequestOptions

USER = {"role": "user", "content": "Where is Ada?"}
FIND = {
    "type": "object",
    "properties": {"who": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
    "required": ["who"],
    "additionalProperties": False,
}
CALL = """\
<tool_call>
<function=find>
<parameter=who>
Ada
</parameter>
<parameter=n>
2
</parameter>
</function>
</tool_call>"""
BODY = OutputConstraint.json_schema(
    {"type": "object", "properties": {"who": {"type": "string"}}, "additionalProperties": False}
)
THOUGHT = "Let me think.\n</think>\n\n"
CASES = {  # a bar parts what is tokenized apart
    "thinking, JSON": (True, (), {"constraint": BODY}, THOUGHT + '{"who":"Ada 東京"}'),
    "thinking, blanks": (True, (), {"constraint": OutputConstraint.choice([" a", "\n\nb"])}, THOUGHT + "\n\nb"),
    "thinking, a regex": (True, (), {"constraint": OutputConstraint.regex("[A-Z][a-z]+ \\d{2}")}, THOUGHT + "Ada 42"),
    "thinking, calls": (True, (False,), {"tool_choice": "required"}, f"{THOUGHT}{CALL}\n{CALL}"),
    "text, then a strict call": (False, (True,), {}, f"Let me see.\n{CALL}"),
    "JSON or calls: JSON": (False, (True,), {"constraint": BODY}, '{"who":"<tool|_call>"}'),
    "JSON or calls: a call": (True, (True,), {"constraint": BODY}, THOUGHT + CALL),
}


@dataclass
class Course:
    """An answer read token by token. masks: before each token."""

    prompt: PreparedPrompt
    options: RequestOptions
    tokens: list[int]
    masks: list[np.ndarray]
    session: OutputSession


def begin(frontend: Frontend, prompt: PreparedPrompt, options: RequestOptions) -> OutputSession:
    return frontend.output_session(prompt, options, max_tokens=1000)


def masks(session: OutputSession, drafts=()):
    slots = np.full((1 + len(drafts), session.matcher._index.words), 0xFFFFFFFF, np.uint32)
    return slots, session.matcher.lookahead(drafts, slots)


def outcome(session: OutputSession):
    report = session.constraint
    return (
        session.thinking, session.text, session.tool_calls, session.thinking_tokens, session.parsed,
        report.branch, report.complete, report.terminated,
    )  # fmt: skip


@pytest.fixture(scope="module")
def courses(frontend):
    made = {}
    for name, (thinking, strict, options, text) in CASES.items():
        tools = [Tool(name="find", parameters=FIND, strict=s) for s in strict]
        prompt = frontend.prepare(Chat([USER], tools=tools, thinking=thinking))
        chosen = RequestOptions(**options)
        session, seen = begin(frontend, prompt, chosen), []
        tokens = [token for piece in text.split("|") for token in frontend._tokenizer.encode(piece)]
        tokens.append(frontend.stop_ids[0])
        for token in tokens:
            seen.append(masks(session)[0][0])
            assert seen[-1][token >> 5] >> (token & 31) & 1, (name, token)
            session.preview([token])
            session.commit()
        assert session.constraint.terminated
        made[name] = Course(prompt, chosen, tokens, seen, session)
    return made


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15)
@given(data=st.data())
def test_rounds_of_drafts(frontend, courses, name, data):
    course = courses[name]
    session, at = begin(frontend, course.prompt, course.options), 0
    while at < len(course.tokens):
        drafts = course.tokens[at : at + data.draw(st.integers(0, 12))]
        wrong = data.draw(st.integers(0, len(drafts)))
        if wrong < len(drafts):
            words = course.masks[at + wrong]
            illegal = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: frontend.vocab_size] == 0)
            drafts = [*drafts[:wrong], int(data.draw(st.sampled_from(illegal.tolist()))), *drafts[wrong + 1 :]]
        slots, row = masks(session, drafts)
        ended = len(course.tokens) - at - 1  # behind the last token there is no mask
        ready = min(wrong, ended) + 1
        assert row.extent == len(drafts) + 1
        assert row.dead == 0
        assert row.unreachable_from == (ready if ready < row.extent else None)
        for i in range(ready):
            assert (slots[i] == course.masks[at + i]).all()
        produced = course.tokens[at : at + data.draw(st.integers(1, ready))]
        before = outcome(session)
        if data.draw(st.booleans()):
            tried = course.tokens[at : at + data.draw(st.integers(1, ready))]
            session.preview(tried)
            session.discard()
            assert outcome(session) == before
            assert (masks(session)[0][0] == course.masks[at]).all()
        if wrong < len(drafts) and not session.control:
            with pytest.raises(InvariantError):
                session.preview(drafts[: wrong + 1])
            assert outcome(session) == before
        session.preview(produced)
        session.commit()
        at += len(produced)
    assert outcome(session) == outcome(course.session)


def test_a_forced_close_leads_to_the_same_masks(frontend, courses):
    """The budget runs out inside a sentence; the content after the close is constrained as after a natural one."""
    course = courses["thinking, JSON"]
    options = RequestOptions(constraint=BODY, thinking_budget=3)
    session = begin(frontend, course.prompt, options)
    session.preview(course.tokens[:3])
    session.commit()
    assert session.control == frontend.close_tokens
    session.preview_control(session.control)
    session.discard()
    session.preview_control(session.control)
    session.commit()
    content = course.tokens[len(frontend._tokenizer.encode(THOUGHT)) :]
    slots, _ = masks(session, content[:-1])
    assert (slots == np.array(course.masks[-len(content) :])).all()
    session.preview(content)
    session.commit()
    assert session.parsed == {"who": "Ada 東京"}
