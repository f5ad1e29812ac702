"""One request's output: transactions, endings, budgets, events, reconstruction boundaries."""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ninfer.errors import InvalidRequest, InvariantError
from ninfer.frontend import Frontend, OutputSession, Preview
from ninfer.inputs import Chat, TextPrompt, Tool
from ninfer.options import RequestOptions, ToolChoice
from ninfer.results import Delta, TokenLogprob, ToolCallEvent

USER = {"role": "user", "content": "Where is Ada?"}
TOOLS = [Tool(name="find", parameters={"properties": {"who": {"type": "string"}, "n": {"type": "integer"}}})]
BODY = "<parameter=who>\nAda\n</parameter>\n<parameter=n>\n2\n</parameter>\n"
CALL = f"<tool_call>\n<function=find>\n{BODY}</function>\n</tool_call>"
EOS = "<|im_end|>"

FREE = ToolChoice(constraints="automatic")
"""Calls are looked for in free text."""


def encode(frontend: Frontend, text: str) -> list[int]:
    return frontend._tokenizer.encode(text)


def session(frontend: Frontend, prompt=None, *, max_tokens: int = 1000, **options) -> OutputSession:
    if prompt is None:
        prompt = frontend.prepare(Chat([USER], thinking=True))
    chosen = RequestOptions(tool_choice=FREE, **options)
    return frontend.output_session(prompt, chosen, max_tokens=max_tokens)


def step(s: OutputSession, tokens) -> tuple[Preview, list]:
    preview = s.preview(tokens)
    s.commit()
    return preview, s.tell()


def finish(s: OutputSession, reason) -> list:
    s.finish(reason)
    return s.tell()


def run(s: OutputSession, tokens: list[int], size: int = 1) -> tuple[list, Preview]:
    """Feed tokens in rounds of ``size`` until they or the answer end. Returns the events and the last preview."""
    events, preview = [], None
    for i in range(0, len(tokens), size):
        preview, more = step(s, tokens[i : i + size])
        events += more
        if preview.terminal:
            break
    return events, preview


def shown(events, channel: str) -> str:
    return "".join(e.text for e in events if isinstance(e, Delta) and e.channel == channel)


@pytest.fixture(scope="module")
def plain(frontend):
    """A prompt whose answer starts in the content."""
    return frontend.prepare(Chat([USER], thinking=False))


@pytest.fixture(scope="module")
def with_tools(frontend):
    return frontend.prepare(Chat([USER], tools=TOOLS, thinking=True))


# -- answers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_an_answer_with_thinking_text_and_calls(frontend, with_tools, size):
    tokens = encode(frontend, f"Let me see.\n</think>\n\nLooking.\n\n{CALL}\n{CALL}{EOS}")
    s = session(frontend, with_tools)
    events, last = run(s, tokens, size)
    assert last.terminal == ("tool_calls", "eos")
    assert finish(s, "tool_calls") == []
    assert (s.thinking, s.text) == ("Let me see.", "Looking.")
    assert (shown(events, "thinking"), shown(events, "content")) == (s.thinking, s.text)
    calls = [e for e in events if isinstance(e, ToolCallEvent)]
    assert [e.index for e in calls] == [0, 1]
    assert tuple(e.call for e in calls) == s.tool_calls
    assert s.tool_calls[0].arguments == {"who": "Ada", "n": 2}
    assert s.tool_calls[0].arguments_json == '{"who":"Ada","n":2}'
    assert all(len(c.id) == 29 and c.id.startswith("call_") for c in s.tool_calls)
    assert s.tool_calls[0].id != s.tool_calls[1].id
    assert s.token_ids == tuple(tokens)
    assert s.thinking_tokens == tokens.index(encode(frontend, "</think>")[0]) + 1


def test_call_ids_do_not_depend_on_rounds(frontend, with_tools):
    tokens = encode(frontend, f"</think>{CALL}{EOS}")
    ids = set()
    for size in (1, 7, 100):
        s = session(frontend, with_tools)
        run(s, tokens, size)
        ids.add(s.tool_calls[0].id)
    assert len(ids) == 1


def test_a_text_prompt_has_no_channels_and_no_tools(frontend):
    s = session(frontend, frontend.prepare(TextPrompt("Once")))
    run(s, encode(frontend, f"</think>{CALL}"))
    s.finish("length")
    assert (s.text, s.thinking, s.tool_calls, s.thinking_tokens) == (f"</think>{CALL}", "", (), 0)


def test_calls_without_declared_tools_are_text(frontend, plain):
    s = session(frontend, plain)
    _, last = run(s, encode(frontend, CALL + EOS))
    assert (s.text, s.tool_calls, last.terminal) == (CALL, (), ("stop", "eos"))


def test_control_tokens_are_not_shown(frontend, plain):
    s = session(frontend, plain, ignore_eos=True)
    run(s, encode(frontend, "a<|im_start|>b<|im_end|>c<|endoftext|><tool_response>"))
    assert s.text == "abc<tool_response>"


def test_a_split_character_comes_with_its_last_token(frontend, plain):
    text = "x😀y한\ufffdz"
    tokens = encode(frontend, text)
    s = session(frontend, plain)
    total = b""
    for token in tokens:
        total += frontend.token_bytes(token)
        _, events = step(s, [token])
        assert s.text == total.decode("utf-8", "ignore").rstrip("\ufffd") or s.text == total.decode()
        assert "\ufffd" not in shown(events, "content") or token == tokens[-2] or "\ufffd" in text
    assert s.text == text


def test_an_unfinished_character_shows_at_the_end(frontend, plain):
    tokens = encode(frontend, "😀")
    assert len(tokens) > 1
    s = session(frontend, plain)
    run(s, tokens[:-1])
    assert s.text == ""
    assert finish(s, "cancelled") == [Delta("content", "\ufffd", tuple(tokens[:-1]))]


# -- events --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 4, 50])
def test_every_token_is_in_at_most_one_delta_with_its_logprob(frontend, with_tools, size):
    tokens = encode(frontend, f"Hm. 😀\n</think>\n\nText with 한글\n\n{CALL}\nmore{EOS}")
    scores = [TokenLogprob(token, -float(i)) for i, token in enumerate(tokens)]
    s = session(frontend, with_tools, logprobs=0)
    events = []
    for i in range(0, len(tokens), size):
        s.preview(tokens[i : i + size], scores[i : i + size])
        s.commit()
        events += s.tell()
    deltas = [e for e in events if isinstance(e, Delta)]
    seen = [score for delta in deltas for score in delta.logprobs]
    assert [score.token_id for score in seen] == [token for delta in deltas for token in delta.token_ids]
    assert seen == sorted(seen, key=lambda score: -score.logprob)
    assert len(seen) == len(set(seen))
    assert s.logprobs == tuple(scores)


def test_neighbouring_pieces_of_a_channel_are_one_delta(frontend, plain):
    tokens = encode(frontend, "one two three")
    _, events = step(session(frontend, plain), tokens)
    assert events == [Delta("content", "one two three", tuple(tokens))]


# -- endings -------------------------------------------------------------------------------------------------------


def test_stop_ids(frontend, plain):
    [dot] = encode(frontend, ".")
    end, other = (encode(frontend, name)[0] for name in (EOS, "<|endoftext|>"))
    a, b = encode(frontend, "a")[0], encode(frontend, "b")[0]
    for options, tokens, accepted, terminal in (
        ({}, [a, end, b], 2, ("stop", "eos")),
        ({}, [a, other, b], 2, ("stop", "eos")),
        ({"ignore_eos": True}, [a, end, b], 3, None),
        ({"stop_token_ids": [dot]}, [a, dot, b], 2, ("stop", "stop_token")),
        ({"stop_token_ids": [end], "ignore_eos": True}, [a, end], 2, ("stop", "eos")),
        ({"stop_token_ids": [dot]}, [a, end], 2, ("stop", "eos")),
    ):
        s = session(frontend, plain, **options)
        preview, _ = step(s, tokens)
        assert (preview.accepted, preview.terminal) == (accepted, terminal)
        assert s.token_ids == tuple(tokens[:accepted])
        assert "." not in s.text


def test_eos_ends_inside_thinking(frontend):
    s = session(frontend)
    _, last = run(s, encode(frontend, f"Hm.\n\n{EOS}"))
    assert (last.terminal, s.thinking, s.text) == (("stop", "eos"), "Hm.\n\n", "")


def test_unknown_stop_ids_are_refused(frontend, plain):
    with pytest.raises(InvalidRequest) as refusal:
        session(frontend, plain, stop_token_ids=[3, frontend.vocab_size])
    assert refusal.value.field == "stop_token_ids[1]"
    with pytest.raises(InvalidRequest) as refusal:
        session(frontend, plain, max_tokens=0)
    assert refusal.value.field == "max_tokens"


@pytest.mark.parametrize("size", range(1, 8))
def test_a_stop_string_over_several_tokens(frontend, plain, size):
    tokens = encode(frontend, "The answer: 42. END OF TEXT and more")
    stop = "END OF TEXT"
    assert len(encode(frontend, stop)) >= 5
    s = session(frontend, plain, stop=stop)
    events, last = run(s, tokens, size)
    assert last.terminal == ("stop", "stop_string")
    assert s.text == shown(events, "content") == "The answer: 42. "
    assert frontend.decode(s.token_ids) == "The answer: 42. END OF TEXT"
    assert finish(s, "stop") == []


def test_tokens_behind_a_stop_string_are_not_accepted(frontend, plain):
    s = session(frontend, plain, stop=" c")
    preview, _ = step(s, encode(frontend, "a b c d e"))
    assert frontend.decode(s.token_ids) == "a b c"
    assert preview.accepted == len(s.token_ids)


def test_output_budget(frontend, plain):
    tokens = encode(frontend, "one two three")[:5]
    s = session(frontend, plain, max_tokens=3)
    assert step(s, tokens[:1])[0] == Preview(1, None, ())
    assert step(s, tokens[1:])[0] == Preview(2, ("length", "max_tokens"), ())
    assert s.token_ids == tuple(tokens[:3])


def test_a_natural_end_on_the_last_token_wins(frontend, plain):
    a, end = encode(frontend, "a")[0], encode(frontend, EOS)[0]
    assert step(session(frontend, plain, max_tokens=2), [a, end])[0].terminal == ("stop", "eos")
    assert step(session(frontend, plain, max_tokens=2, stop="aa"), [a, a])[0].terminal == ("stop", "stop_string")


def test_held_text_is_released_at_the_limit(frontend, plain):
    tokens = encode(frontend, "wait for it EN")
    s = session(frontend, plain, stop="END", max_tokens=len(tokens))
    run(s, tokens)
    assert s.text == "wait for it EN"


def test_a_call_cut_by_the_limit_keeps_the_finished_ones(frontend, with_tools):
    tokens = encode(frontend, f"</think>Look.\n\n{CALL}\n{CALL}")[:-1]
    s = session(frontend, with_tools, max_tokens=len(tokens))
    _, last = run(s, tokens)
    assert last.terminal == ("length", "max_tokens")
    assert (s.text, len(s.tool_calls)) == ("Look.", 1)


@pytest.mark.parametrize("reason", ["cancelled", "error", "length", "stop"])
def test_finish_releases_what_is_held(frontend, plain, reason):
    s = session(frontend, plain, stop="xyz")
    run(s, encode(frontend, "abc xy"))
    assert s.text == "abc "
    [delta] = finish(s, reason)
    assert delta.text == "xy"
    assert s.text == "abc xy"


# -- thinking budget -----------------------------------------------------------------------------------------------


def test_forced_close(frontend):
    s = session(frontend, thinking_budget=4)
    words = encode(frontend, "Let me think about it for a while")
    assert (s.licence(), s.control) == (4, ())
    step(s, words[:3])
    assert (s.licence(), s.control) == (1, ())
    preview, _ = step(s, words[3:4])
    assert preview.terminal is None
    assert (s.licence(), s.control) == (0, frontend.close_tokens)
    with pytest.raises(InvariantError):
        s.preview(words[4:5])
    with pytest.raises(InvariantError):
        s.preview_control(frontend.close_tokens[:-1])
    assert s.preview_control(frontend.close_tokens).terminal is None
    s.commit()
    assert (s.licence(), s.control) == (None, ())
    run(s, encode(frontend, f"Here.{EOS}"))
    assert (s.thinking, s.text) == (frontend.decode(words[:4]), "Here.")
    assert s.token_ids[4 : 4 + len(frontend.close_tokens)] == frontend.close_tokens
    assert s.thinking_tokens == 4 + len(frontend.close_tokens) - 1  # the close ends with its own tag


def test_a_natural_close_on_the_last_licensed_token(frontend):
    tokens = encode(frontend, "Hm\n</think>")
    s = session(frontend, thinking_budget=len(tokens))
    step(s, tokens)
    assert (s.licence(), s.control) == (None, ())


def test_no_round_passes_the_budget(frontend):
    s = session(frontend, thinking_budget=2)
    with pytest.raises(InvariantError):
        s.preview(encode(frontend, "a b c"))
    inside = encode(frontend, "a</think>b c d")
    assert s.preview(inside).accepted == len(inside)  # it closed in time


def test_budget_zero_closes_at_once(frontend):
    s = session(frontend, thinking_budget=0)
    assert (s.licence(), s.control) == (0, frontend.close_tokens)
    s.preview_control(s.control)
    s.commit()
    assert (s.thinking, s.thinking_tokens) == ("", 2)


def test_a_budget_without_thinking_is_nothing(frontend, plain):
    s = session(frontend, plain, thinking_budget=0)
    assert (s.licence(), s.control) == (None, ())


@pytest.mark.parametrize("max_tokens", range(1, 12))
@pytest.mark.parametrize("budget", [0, 1, 5, 100])
def test_room_for_the_close_is_kept_or_the_request_ends_by_length(frontend, budget, max_tokens):
    """Whatever the two limits: no deadlock, no token too many, and never cut inside a close that had room."""
    s = session(frontend, thinking_budget=budget, max_tokens=max_tokens)
    close = frontend.close_tokens
    word = encode(frontend, " think")[0]
    terminal = None
    while terminal is None:
        if s.control:
            terminal = s.preview_control(s.control).terminal
        else:
            assert s.licence() is None or s.licence() > 0
            terminal = s.preview([word]).terminal
        s.commit()
    assert terminal == ("length", "max_tokens")
    assert len(s.token_ids) == max_tokens
    thought = s.token_ids.index(close[0]) if close[0] in s.token_ids else max_tokens
    assert thought <= budget
    if max_tokens >= len(close):
        assert s.token_ids[thought : thought + len(close)] == close
        assert thought == min(budget, max_tokens - len(close))


# -- misuse --------------------------------------------------------------------------------------------------------


def test_calls_out_of_order_are_bugs(frontend, plain):
    [a] = encode(frontend, "a")
    s = session(frontend, plain)
    for call in (s.commit, s.discard):
        with pytest.raises(InvariantError):
            call()
    for tokens in ([], [-1], [frontend.vocab_size]):
        with pytest.raises(InvariantError):
            s.preview(tokens)
    with pytest.raises(InvariantError):
        s.preview([a, a], [TokenLogprob(a, 0.0)])
    with pytest.raises(InvariantError):
        s.preview_control([a])
    s.preview([a])
    for call in (lambda: s.preview([a]), lambda: s.preview_control([]), s.licence, lambda: s.finish("stop")):
        with pytest.raises(InvariantError):
            call()
    s.commit()
    s.finish("cancelled")
    for call in (lambda: s.preview([a]), lambda: s.finish("stop")):
        with pytest.raises(InvariantError):
            call()


def test_an_ended_answer_takes_no_more(frontend, plain):
    s = session(frontend, plain, max_tokens=1)
    tokens = encode(frontend, "a")
    step(s, tokens)
    with pytest.raises(InvariantError):
        s.preview(tokens)


# -- continuing ----------------------------------------------------------------------------------------------------


def test_only_the_new_text_is_published(frontend):
    prompt = frontend.prepare(Chat([USER, {"role": "assistant", "content": "Ada is in"}], continue_final=True))
    s = session(frontend, prompt, stop="in the")  # the continued text takes no part in stops
    run(s, encode(frontend, f" the garden.{EOS}"))
    assert s.text == " the garden."


def test_a_call_begun_in_the_prompt_is_completed(frontend):
    head = "Looking.\n\n<tool_call>\n<function=find>\n<parameter=who>\nA"
    chat = Chat([USER, {"role": "assistant", "content": head}], tools=TOOLS, continue_final=True)
    s = session(frontend, frontend.prepare(chat))
    _, last = run(s, encode(frontend, f"da\n</parameter>\n</function>\n</tool_call>{EOS}"))
    assert last.terminal == ("tool_calls", "eos")
    assert (s.text, s.tool_calls[0].arguments) == ("", {"who": "Ada"})
    s = session(frontend, frontend.prepare(chat))
    run(s, encode(frontend, f"da!{EOS}"))
    assert s.text == "da!"


# -- reconstruction boundaries -------------------------------------------------------------------------------------


def history(qwen, s: OutputSession, *later, **keys):
    answer = {"role": "assistant", "content": s.text, "reasoning_content": s.thinking, "tool_calls": list(s.tool_calls)}
    return qwen.prepare(Chat([USER, answer, *later], tools=TOOLS, **keys))


THINKING = [
    "Let me see.",
    "Two\n\nlines: a, b.",
    "Ends in space ",
    " starts so",
    "東京 😀",
    "x\n",
    "\nx",
    "<think>",
    "a < b",
    "",
    "\n\n",
]
FRAMES = ["\n</think>\n\n", "</think>\n\n", "\n</think>\n", "\n\n</think>\n\n", "\n</think>\n\n\n", "</think>"]
CONTENT = ["In the garden.", "", CALL, "\nLook. ", f"Look.\n\n{CALL}", "  indented"]


def test_boundaries_are_reached_again_by_the_next_prompt(qwen):
    """Re-render the answer as history: a reported position has the same tokens before it, and is a frontier there."""
    asked = qwen.prepare(Chat([USER], tools=TOOLS, thinking=True))
    reported = 0
    rng = random.Random(0)
    for thinking in THINKING:
        for frame in FRAMES:
            text = thinking + frame + rng.choice(CONTENT) + EOS
            tokens = encode(qwen, text)
            s = session(qwen, asked)
            boundaries = []
            for start in range(0, len(tokens), 3):
                preview = s.preview(tokens[start : start + 3])
                assert all(0 < offset <= preview.accepted for offset in preview.boundaries)
                boundaries += [len(asked) + start + offset for offset in preview.boundaries]
                s.commit()
            prompt = history(qwen, s, {"role": "tool", "content": "t"})
            sequence = [*asked.tokens.tolist(), *tokens]
            for position in boundaries:
                assert prompt.tokens[:position].tolist() == sequence[:position]
            inside = [f for f in prompt.identity.execution_frontiers if f > len(asked)]
            reached = [f for f in inside if prompt.tokens[:f].tolist() == sequence[:f]]
            assert reached == boundaries
            reported += len(boundaries)
            clean = thinking == thinking.strip() != "" and thinking != "<think>"
            if clean and frame == "\n</think>\n\n":
                assert boundaries
    assert reported > 6


def test_no_boundary_for_tokens_the_tokenizer_would_not_choose(frontend, with_tools):
    tokens = [token for character in "Let me see.\n" for token in encode(frontend, character)] + encode(
        frontend, "</think>\n\nx"
    )
    _, last = run(session(frontend, with_tools), tokens, size=100)
    assert last.boundaries == ()


def test_forced_close_has_a_boundary(frontend, with_tools):
    s = session(frontend, with_tools, thinking_budget=3)
    step(s, encode(frontend, "Let me think about")[:3])
    preview = s.preview_control(s.control)
    assert preview.boundaries == (len(frontend.close_tokens),)


def test_no_boundaries_where_the_template_drops_thinking(tiny):
    source = tiny.TEMPLATE.replace("(message.reasoning_content or '')", "''")
    frontend = Frontend(tiny.resources(source))
    prompt = frontend.prepare(USER["content"])
    _, last = run(session(frontend, prompt), encode(frontend, "Hm.\n</think>\n\nx"), size=50)
    assert last.boundaries == ()


def test_frontiers_of_prompts(frontend):
    turn = {"role": "assistant", "content": "c", "reasoning_content": "r"}
    prompt = frontend.prepare(
        Chat([USER, turn, {"role": "tool", "content": "t"}, turn, {"role": "tool", "content": "t"}])
    )
    frontiers = prompt.identity.execution_frontiers
    assert len(frontiers) == 2
    assert all(frontend.decode(prompt.tokens[:f].tolist()).endswith("<think>\nr\n</think>\n\n") for f in frontiers)
    off = frontend.prepare(Chat([USER], thinking=False))
    assert off.identity.execution_frontiers == (len(off),)


# -- state machine -------------------------------------------------------------------------------------------------


PIECES = ["a b", " me", "Let", "</think>", "</thi", "nk>", "\n", "\n\n", "st", "op", EOS, "😀", CALL, CALL[:40]]


class SessionMachine(RuleBasedStateMachine):
    """Previews, commits and discards against one reading of all committed tokens."""

    frontend: Frontend
    prompts: tuple

    @initialize(
        prompt=st.integers(0, 2), stop=st.sampled_from([(), ("stop",), ("a b", " me")]),
        budget=st.none() | st.integers(0, 8),
        limit=st.integers(1, 60), in_thinking=st.booleans(),
    )  # fmt: skip
    def start(self, prompt, stop, budget, limit, in_thinking):
        self.options = RequestOptions(
            stop=stop, thinking_budget=budget, thinking_stop=in_thinking and bool(stop), tool_choice=FREE
        )
        self.prompt, self.limit = self.prompts[prompt], limit
        self.session = self.frontend.output_session(self.prompt, self.options, max_tokens=limit)
        self.committed: list[tuple[str, list[int]]] = []
        self.events: list = []
        self.open: tuple | None = None
        self.terminal = None

    @precondition(lambda self: self.open is None and self.terminal is None and not self.session.control)
    @rule(text=st.lists(st.sampled_from(PIECES), min_size=1, max_size=3),
          cut=st.integers(1, 12))  # fmt: skip
    def preview(self, text, cut):
        ids = encode(self.frontend, "".join(text))[:cut]
        licence = self.session.licence()
        ids = ids if licence is None else ids[:licence]
        result = self.session.preview(ids)
        assert 1 <= result.accepted <= len(ids)
        assert result.terminal is not None or result.accepted == len(ids)
        self.open = ("sampled", ids[: result.accepted], result)

    @precondition(lambda self: self.open is None and self.terminal is None and self.session.control)
    @rule()
    def force(self):
        ids = list(self.session.control)
        self.open = ("forced", ids, self.session.preview_control(ids))

    @rule()
    def prepare(self):
        """At any time, as often as one likes; it changes nothing."""
        self.session.prepare()

    @precondition(lambda self: self.open is not None)
    @rule()
    def commit(self):
        kind, ids, result = self.open
        self.session.commit()
        self.committed.append((kind, ids))
        self.open, self.terminal = None, result.terminal

    @precondition(lambda self: self.terminal is not None)
    @rule()
    def ended(self):
        with pytest.raises(InvariantError):
            self.session.preview([0])

    @precondition(lambda self: self.open is not None)
    @rule()
    def discard(self):
        self.session.discard()
        self.open = None

    @rule()
    def tell(self):
        self.events += self.session.tell()

    @invariant()
    def budgets_are_those_of_one_reading(self):
        """Whatever has been told, and without having it told."""
        if hasattr(self, "session"):
            again = self.reading()
            assert (again.control, again.thinking_tokens) == (self.session.control, self.session.thinking_tokens)
            if self.open is None:
                assert again.licence() == self.session.licence()

    def reading(self) -> OutputSession:
        """What is committed, read token by token as it comes: a stop string is looked for in all of it."""
        options = self.options if self.options.stop else attrs.evolve(self.options, stop="\0", thinking_stop=True)
        again = self.frontend.output_session(self.prompt, options, max_tokens=self.limit)
        for kind, ids in self.committed:
            again.preview_control(ids) if kind == "forced" else again.preview(ids)
            again.commit()
        return again

    @rule()
    def look(self):
        again = self.reading()
        for name in ("text", "thinking", "tool_calls", "token_ids", "thinking_tokens", "control"):
            assert getattr(again, name) == getattr(self.session, name)
        self.tell()
        assert shown(self.events, "content") == self.session.text
        assert shown(self.events, "thinking") == self.session.thinking
        assert len(self.session.token_ids) <= self.limit
        assert self.session.token_ids == tuple(token for _, ids in self.committed for token in ids)

    def teardown(self):
        if not hasattr(self, "session"):
            return
        if self.open is not None:
            self.session.discard()
        self.look()
        self.session.finish("cancelled")
        self.events += self.session.tell()
        assert shown(self.events, "content") == self.session.text
        assert shown(self.events, "thinking") == self.session.thinking


def test_session_state_machine(frontend, with_tools):
    plain = frontend.prepare(Chat([USER], thinking=False))
    machine = type(
        "Machine", (SessionMachine,), {"frontend": frontend, "prompts": (with_tools, plain, frontend.prepare("q"))}
    )
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(stateful_step_count=12))


@given(
    st.lists(st.sampled_from(["a", " b", "</think>", "\n", "😀", "stop", "<tool_call>", "é", ".", EOS]), max_size=20),
    st.data(),
)
def test_rounds_do_not_matter(frontend, with_tools, parts, data):
    """Any grouping of the tokens into rounds gives the same answer as one token at a time."""
    tokens = encode(frontend, "".join(parts))
    if not tokens:
        return
    one, other = session(frontend, with_tools, stop="b."), session(frontend, with_tools, stop="b.")
    run(one, tokens)
    start = 0
    while start < len(tokens):
        end = data.draw(st.integers(start + 1, len(tokens)))
        if data.draw(st.booleans()):
            other.preview(tokens[start:end])
            other.discard()
        if step(other, tokens[start:end])[0].terminal:
            break
        start = end
    assert (one.text, one.thinking, one.tool_calls, one.token_ids) == (
        other.text,
        other.thinking,
        other.tool_calls,
        other.token_ids,
    )
