"""Text resources of a model that was never trained: a byte-level tokenizer, a chat template, generation settings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from string import ascii_lowercase
from typing import Any

from ninfer.errors import InvalidRequest

TOKENS = 248_077
"""Size of the family's token domain; the rows beyond it have weights and no token."""

_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>",
    "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content or [] %}
            {{- part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and enable_thinking is false else '<think>\\n' }}
{%- endif %}
"""


def text_resources(rows: int) -> dict[str, bytes]:
    """The text component's resources for a vocabulary of ``rows`` stored rows, by role."""
    size = min(rows, TOKENS)
    first_special = size - len(_SPECIAL)
    if first_special < 256:
        raise InvalidRequest(f"{rows} rows cannot hold {256 + len(_SPECIAL)} tokens", field="geometry")
    added = [
        {
            "id": first_special + i, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": content not in _PLAIN,
        }
        for i, content in enumerate(_SPECIAL)
    ]  # fmt: skip
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {piece: i for i, piece in enumerate(itertools.islice(_pieces(), first_special))},
            "merges": [],
        },
    }  # fmt: skip
    ids = {content: first_special + i for i, content in enumerate(_SPECIAL)}
    files = {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
        "generation_config.json": {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
    }
    encoded = {role: json.dumps(value, ensure_ascii=False).encode() for role, value in files.items()}
    return {**encoded, "chat_template.jinja": _TEMPLATE.encode()}


def _pieces() -> Iterator[str]:
    """Every byte in GPT-2's printable spelling, then words that nothing merges into: a model can still emit them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    yield from map(chr, printable)
    yield from (chr(0x100 + i) for i in range(256 - len(printable)))
    for length in itertools.count(2):
        for word in itertools.product(ascii_lowercase, repeat=length):
            yield "\u0120" + "".join(word)
