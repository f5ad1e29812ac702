"""Trains the tokenizer of the tiny model and writes its files in the Hugging Face form.

Byte-level BPE as the Qwen3.5 family uses it: NFC, the family's pre-split pattern (single digits, combining marks inside
words), the family's special tokens. The six tags of thinking and tool use are added tokens but not flagged special, so
that they survive decoding.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path

import corpus
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY = 4096
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>",
]  # fmt: skip
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
_ADDED = re.compile("|".join(map(re.escape, SPECIAL + TAGS)))


_CAP = 2000
_COMMON = 10


def pieces(tokenizer: Tokenizer, documents: int) -> Counter[str]:
    """What BPE is trained on: the words and signs of the corpus with balanced counts, so that a word splits alike
    wherever it stands.

    Answers copy words between prose (" Milan"), JSON ("Milan") and calls ("=city", "_city"). Merges therefore never
    join a sign other than the space to a letter, and a word counts the same with and without its space, unless it is
    a verb that opens sentences or stands in prose only; then copying goes piece by piece.
    """
    rng = random.Random(corpus.SEED + 2)
    seen: Counter[str] = Counter()
    for _ in range(documents):
        for text in _ADDED.split(corpus.render(corpus.dialogue(rng))):
            for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text):
                piece = text[start:end]
                if len(piece) > 1 and piece[-1].isalpha() and not piece[0].isalpha() and piece[0] != " ":
                    seen.update((piece[0], piece[1:]))
                else:
                    seen[piece] += 1
    for word in {piece.strip(" ") for piece in seen if piece[-1].isalpha()}:
        bare, spaced = seen[word], seen[f" {word}"]
        named = word[0].isupper() and spaced >= _COMMON
        if named or min(bare, spaced) >= _COMMON or max(bare, spaced) < _COMMON:
            seen[word] = seen[f" {word}"] = max(bare, spaced)
    return Counter({piece: min(count, _CAP) for piece, count in seen.items()})


def train(documents: int = 10_000) -> Tokenizer:
    """A tokenizer of exactly `VOCABULARY` tokens, the added ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counts = pieces(tokenizer, documents)
    tokenizer.train_from_iterator((piece for piece, count in counts.items() for _ in range(count)), trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL + TAGS}
    template = (corpus.HERE / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "added_tokens_decoder": {
            str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": text in SPECIAL}
            for text, i in ids.items()
        },
    }  # fmt: skip
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
        "pad_token_id": ids["<|endoftext|>"],
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    for name, value in (("tokenizer_config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
