"""A small byte-level BPE with the family's special tokens, as the bytes of the files an artifact carries.

A plain module: load it by path where a tokenizer is needed without a checkpoint.
"""

from __future__ import annotations

import json

from ninfer.frontend import FrontendResources

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# (content, special), in the order of their ids behind the base vocabulary.
ADDED = [
    ("<|endoftext|>", True), ("<|im_start|>", True), ("<|im_end|>", True), ("<|vision_start|>", True),
    ("<|vision_end|>", True), ("<|image_pad|>", True), ("<|video_pad|>", True), ("<tool_call>", False),
    ("</tool_call>", False), ("<tool_response>", False), ("</tool_response>", False), ("<think>", False),
    ("</think>", False),
]  # fmt: skip
CONFIG_ONLY = [("<tts_pad>", True), ("<|audio_pad|>", True)]
"""Tokens only tokenizer_config.json lists, as in the released models."""

TEXT = (
    """The quick brown fox jumps over the lazy dog. Where is Ada? She is in the garden, reading a letter.
system user assistant tool function parameter name description type object properties required integer string
{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}
# Tools\n\nYou have access to the following functions: <function=f>\n<parameter=x>\n1\n</parameter>\n</function>
Let me think about this. First, we check the list; then we answer.\n\nThe answer is 42.
Größe, naïve, señor, 東京, 서울, Привет, مرحبا, emoji 😀.
"""
    * 4
)

TEMPLATE = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- (message.content or '') + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is false %}
        {{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
"""A minimal chat protocol for tests without the published template."""


def tokenizer_json(size: int = 512) -> bytes:
    """A trained tokenizer.json with ``size`` base tokens (byte alphabet included), then ADDED."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken(content, special=special, normalized=False) for content, special in ADDED])
    return tokenizer.to_str().encode()


def resources(template: str = TEMPLATE, *, size: int = 512) -> FrontendResources:
    """Everything a Frontend needs, over the trained vocabulary."""
    data = tokenizer_json(size)
    first = 1 + max(token["id"] for token in json.loads(data)["added_tokens"])
    extra = {str(first + i): {"content": c, "special": s} for i, (c, s) in enumerate(CONFIG_ONLY)}
    ids = {token["content"]: token["id"] for token in json.loads(data)["added_tokens"]}
    config = {"added_tokens_decoder": extra, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    generation = {"eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_p": 0.95, "top_k": 20}
    return FrontendResources(
        tokenizer_json=data,
        tokenizer_config=json.dumps(config).encode(),
        chat_template=template,
        generation_config=json.dumps(generation).encode(),
        vocab_rows=first + len(CONFIG_ONLY) + 32,
    )
