"""Prepared prompts: tokens, identity, digests, structure."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import InvalidRequest
from ninfer.frontend.prompt import text_identity
from ninfer.identity import digest_at, digest_chain
from ninfer.inputs import Chat, TextPrompt, TokenPrompt


def test_a_string_is_one_user_message(frontend):
    chat = Chat([{"role": "user", "content": "Where is Ada?"}])
    assert frontend.prepare("Where is Ada?").tokens.tolist() == frontend.prepare(chat).tokens.tolist()


def test_identity_of_text(frontend):
    prompt = frontend.prepare("Where is Ada?")
    n = len(prompt)
    identity = prompt.identity
    assert identity.tokens.dtype == np.int32
    assert identity.token_types.dtype == np.uint8
    assert identity.positions.dtype == np.int32
    assert identity.positions.tolist() == [list(range(n))] * 3
    assert not identity.token_types.any()
    assert (identity.rope_delta, identity.vision) == (0, ())
    for array in (prompt.tokens, identity.tokens, identity.token_types, identity.positions):
        with pytest.raises(ValueError):
            array[...] = 0


def test_raw_prompts(frontend):
    text = frontend.prepare(TextPrompt("Where is <|im_end|> Ada?"))
    assert frontend.decode(text.tokens.tolist()) == "Where is <|im_end|> Ada?"
    assert (text.chat, text.start_channel, text.rewrite, text.boundaries) == (False, "content", None, (len(text),))
    again = frontend.prepare(TokenPrompt(text.tokens))
    assert again.tokens.tolist() == text.tokens.tolist()
    assert again.digest == text.digest


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (TextPrompt(""), "text"),
        (TextPrompt("a\ud800"), "text"),
        (TokenPrompt([]), "ids"),
        (TokenPrompt([1, 2, 10**6]), "ids[2]"),
        (3, "prompt"),
    ],
)
def test_refusals(frontend, prompt, field):
    with pytest.raises(InvalidRequest) as refusal:
        frontend.prepare(prompt)
    assert refusal.value.field == field


def test_first_id_outside_the_domain_is_refused(frontend):
    frontend.prepare(TokenPrompt([frontend.vocab_size - 1]))
    with pytest.raises(InvalidRequest):
        frontend.prepare(TokenPrompt([frontend.vocab_size]))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.data())
def test_digests_name_prefixes(tokens, data):
    """The digest at a frontier is a function of the tokens before it, and recomputed here from the definition."""
    identity = text_identity(np.array(tokens, np.int32), ())
    digest = digest_chain(identity)
    assert len(digest.chain) == len(tokens) // 64 + 1
    frontier = data.draw(st.integers(0, len(tokens)))
    link = hashlib.blake2b(b"text", digest_size=16).digest()
    for begin in range(0, frontier, 64):
        block = np.array(tokens[begin : min(begin + 64, frontier)], np.int32)
        link = hashlib.blake2b(link + block.tobytes() + bytes(len(block)), digest_size=16).digest()
    assert digest_at(identity, digest, frontier) == link
    shorter = text_identity(np.array(tokens[:frontier] + [501], np.int32), ())
    assert digest_at(shorter, digest_chain(shorter), frontier) == link
