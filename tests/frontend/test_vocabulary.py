"""The public token domain and how its three sources must agree."""

from __future__ import annotations

import json

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.errors import ArtifactError
from ninfer.frontend import Frontend
from ninfer.frontend.vocabulary import TokenBytes


def changed(resources, *, tokenizer=None, config=None, **other):
    """The resources after ``tokenizer(spec)`` and ``config(spec)`` edited the two JSON files in place."""
    spec, settings = json.loads(resources.tokenizer_json), json.loads(resources.tokenizer_config)
    for edit, value in ((tokenizer, spec), (config, settings)):
        if edit is not None:
            edit(value)
    data = {"tokenizer_json": json.dumps(spec).encode(), "tokenizer_config": json.dumps(settings).encode()}
    return attrs.evolve(resources, **{**data, **other})


def test_domain_is_the_union_of_the_files(frontend, tiny):
    assert frontend.vocab_size == 512 + len(tiny.ADDED) + len(tiny.CONFIG_ONLY)
    for i, (content, _) in enumerate([*tiny.ADDED, *tiny.CONFIG_ONLY]):
        assert frontend.token_bytes(512 + i) == content.encode()
        assert frontend.decode([512 + i]) == content


def test_tokens_of_the_config_alone_are_cut_out_of_text(frontend, tiny):
    content = tiny.CONFIG_ONLY[-1][0]
    prompt = frontend.prepare(f"a{content}b")
    assert frontend.vocab_size - 1 in prompt.tokens


def test_bytes_cover_every_byte_and_reproduce_text(frontend):
    singles = {frontend.token_bytes(i) for i in range(512) if len(frontend.token_bytes(i)) == 1}
    assert singles == {bytes([b]) for b in range(256)}


def _set(path, value):
    def edit(spec):
        for key in path[:-1]:
            spec = spec[key]
        spec[path[-1]] = value

    return edit


def _entry(content, **flags):
    return {"content": content, "special": True, "lstrip": False, "rstrip": False, "single_word": False, **flags}


REFUSED = {
    "gap in the ids": {"config": _set(["added_tokens_decoder", "600"], _entry("<|x|>"))},
    "content disagrees": {"config": _set(["added_tokens_decoder", "512"], _entry("<|x|>"))},
    "special flag disagrees": {"config": _set(["added_tokens_decoder", "519"], _entry("<tool_call>"))},
    "content has two ids": {"config": _set(["added_tokens_decoder", "527"], _entry("<|im_end|>"))},
    "added token is another base token": {"config": _set(["added_tokens_decoder", "3"], _entry("<|x|>"))},
    "base content under a new id": {"config": _set(["added_tokens_decoder", "527"], _entry("a"))},
    "key is not a number": {"config": _set(["added_tokens_decoder", "x"], _entry("<|x|>"))},
    "swallows white space": {"config": _set(["added_tokens_decoder", "527"], _entry("<|x|>", lstrip=True))},
    "no content": {"config": _set(["added_tokens_decoder", "527"], {"special": True})},
    "lone surrogate": {"config": _set(["added_tokens_decoder", "527"], _entry("<\ud800>"))},
    "added_tokens_decoder is a list": {"config": _set(["added_tokens_decoder"], [1])},
    "two base tokens with one id": {"tokenizer": _set(["model", "vocab", "zzz"], 5)},
    "negative id": {"tokenizer": _set(["model", "vocab", "a"], -1)},
    "id is a string": {"tokenizer": _set(["model", "vocab", "a"], "7")},
    "id is a bool": {"tokenizer": _set(["model", "vocab", "a"], True)},
    "not byte-level": {"tokenizer": _set(["model", "vocab"], {" ": 0, "a": 1})},
    "empty vocabulary": {"tokenizer": _set(["model", "vocab"], {})},
    "no vocabulary": {"tokenizer": _set(["model"], {"type": "BPE"})},
    "another model": {"tokenizer": _set(["model", "type"], "WordPiece")},
    "added_tokens is no list": {"tokenizer": _set(["added_tokens"], {"a": 1})},
    "added token is no object": {"tokenizer": _set(["added_tokens"], [7])},
    "merges do not parse": {"tokenizer": _set(["model", "merges"], [["never", "seen"]])},
    "lossy pre-tokenizer": {"tokenizer": _set(["pre_tokenizer"], {"type": "Whitespace"})},
    "prefix space": {"tokenizer": _set(["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True)},
    "more tokens than rows": {"vocab_rows": 526},
    "not JSON": {"tokenizer_json": b"{"},
    "not UTF-8": {"tokenizer_json": b"\xff\xfe{"},
    "not an object": {"tokenizer_config": b"[]"},
    "nested without end": {"tokenizer_config": b"[" * 100_000},
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_file(tiny_resources, case):
    with pytest.raises(ArtifactError) as refusal:
        Frontend(changed(tiny_resources, **REFUSED[case]))
    assert refusal.value.where.startswith(("tokenizer.json", "tokenizer_config.json"))
    assert refusal.value.reason


def test_rows_beyond_the_domain_are_allowed(tiny_resources):
    Frontend(changed(tiny_resources, vocab_rows=527))


@given(st.lists(st.binary(max_size=3), min_size=1, max_size=20), st.data())
def test_the_block_of_token_bytes_reads_like_a_list(items: list[bytes], data: st.DataObject) -> None:
    tokens = TokenBytes(b"".join(items), map(len, items))
    assert list(tokens) == [tokens[i] for i in range(len(tokens))] == items
    assert tokens.lengths().tolist() == [len(item) for item in items]
    hidden = data.draw(st.sets(st.integers(0, len(items) - 1)))
    assert list(tokens.without(hidden)) == [b"" if i in hidden else item for i, item in enumerate(items)]
    byte = data.draw(st.integers(0, 255))
    assert tokens.ending_with(byte) == [i for i, item in enumerate(items) if item.endswith(bytes([byte]))]
