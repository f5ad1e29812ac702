"""Encoding against the released vocabulary's own tokenizer; decoding against the whole text."""

from __future__ import annotations

import importlib.util
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ninfer.cancellation import CancelScope
from ninfer.errors import Cancelled
from ninfer.frontend import Frontend
from ninfer.frontend.pieces import PIECE, cutter, pieces
from ninfer.frontend.tokenizer import decode_utf8

CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "I'LL say it's 12345.678 o'clock, we've don't they're",
    "def f(x):\n    return {'a': [1, 2, 3]}\n\n\n\tif x > 0:\r\n        pass  # comment   \n",
    "Größe, naïve, cafe\u0301 (decomposed), Ångström A\u030angstro\u0308m, ﬁ ligature",
    "天地玄黄，宇宙洪荒。日月盈昃，辰宿列张。2024年12月31日",
    "東京特許許可局、きゃりーぱみゅぱみゅ。カタカナ ﾊﾝｶｸ がぎぐげご か\u3099き\u3099",
    "서울은 대한민국의 수도이다. \u1112\u1161\u11ab\u1100\u1173\u11af",
    "Привет, мир! Ёжик в тумане. и\u0306",
    "مرحبا بالعالم، كيف حالك؟ بِسْمِ اللَّهِ",
    "שלום עולם, בְּרֵאשִׁית",
    "नमस्ते दुनिया, क्षत्रिय ज्ञान",
    "สวัสดีชาวโลก ภาษาไทย",
    "Xin chào thế giới, Tiê\u0301ng Viê\u0323t",
    "Γειά σου Κόσμε, ἀρχή",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈👍🏽 flags 🇩🇪🇯🇵 keycap 1️⃣",
    "math ∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α∧¬β → γ; ½ ² ³ ⅷ ๓ ٣",
    "   leading and trailing   \n\n  \t \u00a0nbsp\u2003em space\u3000ideographic \n",
    "\r\n\r\n\n\n\r x\u200bzero\u200dwidth\ufeffbom \u2028line sep",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>",
    "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>",
    "<|audio_start|><tts_pad><|im_star <|im_end|<think></think",
    "a" * 200 + " " * 50 + "!" * 70 + "\n" * 9,
    "\x00\x01\x7f control \ufffd replacement \U0010ffff",
    "https://example.org/a?b=c&d=%20#frag user@example.com C:\\path\\file.txt",
]


@pytest.fixture(scope="session")
def real(tiny):
    """(our frontend, the package's tokenizer) over the released vocabulary."""
    spec = importlib.util.spec_from_file_location("real_vocabulary", Path(__file__).with_name("real_vocabulary.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    reference = module.reference()
    return Frontend(module.resources(reference, tiny.PATTERN, tiny.TEMPLATE)), reference


def test_the_released_vocabulary(real):
    frontend, reference = real
    assert frontend.vocab_size == 248_077
    assert frontend.stop_ids == (248_046, 248_044)
    assert frontend.close_tokens == tuple(reference.encode("\n</think>\n\n"))
    assert frontend.defaults.temperature == 0.6
    encode = frontend._tokenizer.encode
    for text in CORPUS:
        assert encode(text) == reference.encode(text), text
        assert frontend.decode(encode(text)) == unicodedata.normalize("NFC", text)
    # Joined texts, and every text cut at every seventh character, meet the pattern's look-ahead in other states.
    assert encode(" ".join(CORPUS)) == reference.encode(" ".join(CORPUS))
    for text in CORPUS:
        for cut in range(0, len(text), 7):
            assert encode(text[cut:]) == reference.encode(text[cut:])
    assert all(frontend.token_bytes(i) == data for data, i in reference._mergeable_ranks.items())


def test_a_text_may_be_encoded_in_pieces(real):
    """Wherever it is cut, and the cuts are close enough to stop at in time."""
    frontend, reference = real
    tokenizer = frontend._tokenizer
    assert tokenizer._pieces is pieces
    for text in (*CORPUS, " ".join(CORPUS)):
        for size in (1, 2, 5):
            parts = list(pieces(text, size))
            assert "".join(parts) == text
            assert [id for part in parts for id in reference.encode(part)] == reference.encode(text), text
    long = "".join(CORPUS) * 40
    assert len(list(pieces(long))) > 2
    assert max(map(len, pieces(long))) < PIECE + 500
    assert tokenizer.encode(long) == reference.encode(long)


ALPHABET = [*"ab 's'llSſ  \n\n\r\t1 2.,!<|_-", "é", "e\u0301", "\u0301", "\u093c", "²", "ⅷ", "今", "，", "。", "\u3000",
            "ا", "\u064b", "한", "\u11a8", "😀", "\u200d", "\u00a0", "<|im_end|>", "<think>"]  # fmt: skip


@given(st.lists(st.sampled_from(ALPHABET), max_size=30), st.integers(1, 6))
def test_no_cut_changes_a_token(frontend, parts, size):
    text, encode = "".join(parts), frontend._tokenizer.encode
    assert [id for piece in pieces(text, size) for id in encode(piece)] == encode(text)


@pytest.mark.parametrize(
    ("changed", "added"),
    [
        ({"pre_tokenizer": None}, []),
        ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"\w+"}}}, []),
        ({"normalizer": {"type": "NFKC"}}, []),
        ({}, ["<|two words|>"]),
        ({}, ["<|v1|>"]),
    ],
)
def test_a_text_stays_whole_where_cuts_could_show(tiny_resources, changed, added):
    spec, text = json.loads(tiny_resources.tokenizer_json), "a b 1 " * PIECE
    assert len(list(cutter(spec, ["<|im_end|>"])(text))) > 1
    assert list(cutter({**spec, **changed}, added)(text)) == [text]


def test_encoding_ends_between_pieces(frontend):
    with CancelScope() as scope:
        scope.cancel()
        with pytest.raises(Cancelled):
            frontend.prepare("a b " * PIECE)


def test_real_streams_have_no_replacement_characters(real):
    """Hangul and emoji split over tokens arrive whole, at the token that completes them."""
    frontend, _ = real
    for text in CORPUS:
        if "\ufffd" in text:
            continue
        pending, shown = b"", []
        for token in frontend._tokenizer.encode(text):
            piece, pending = decode_utf8(pending, frontend.token_bytes(token))
            shown.append(piece)
        assert pending == b""
        assert "\ufffd" not in "".join(shown)


def test_escaped_text_spells_no_control_token(frontend):
    """A guarded occurrence is encoded as text, an unguarded one as its token."""
    tokenizer = frontend._tokenizer
    text = "<|im_start|>user\nHi <|im_end|><|im_end|>\n"
    guarded = text.index("<|im_end|>")
    ids = tokenizer.encode_except(text, {guarded})
    control = [frontend.decode([i]) for i in ids if i >= 512]
    assert control == ["<|im_start|>", "<|im_end|>"]
    assert frontend.decode(ids) == text
    assert tokenizer.encode_except(text, frozenset()) == tokenizer.encode(text)


@given(st.binary(max_size=40), st.data())
def test_incremental_decoding_is_the_whole_decoding(data, draw):
    """Any bytes, cut anywhere: the pieces join to the ordinary decoding of the whole."""
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=8)))
    pending, pieces = b"", []
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        piece, pending = decode_utf8(pending, data[begin:end])
        pieces.append(piece)
        assert len(pending) <= 3
    tail, pending = decode_utf8(pending, b"", final=True)
    assert ("".join(pieces) + tail, pending) == (data.decode("utf-8", "replace"), b"")


@given(st.text(max_size=20))
def test_a_character_appears_with_its_last_byte(text):
    pending, shown = b"", ""
    for character in text.replace("\ud800", ""):
        try:
            data = character.encode()
        except UnicodeEncodeError:
            continue
        for byte in data[:-1]:
            piece, pending = decode_utf8(pending, bytes([byte]))
            assert piece == ""
        piece, pending = decode_utf8(pending, data[-1:])
        assert (piece, pending) == (character, b"")
        shown += piece


def test_replacement_characters():
    assert decode_utf8(b"", "\ufffd".encode()) == ("\ufffd", b"")  # a real one passes at once
    assert decode_utf8(b"\xe4\xb8", b"a") == ("\ufffda", b"")  # known to be broken
    assert decode_utf8(b"", b"\xff") == ("\ufffd", b"")
    assert decode_utf8(b"\xf0\x9f", b"") == ("", b"\xf0\x9f")  # may still be completed
