"""The files an artifact carries beside its weights, byte for byte: tokenizer, chat template, generation settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ninfer.convert.hf_config import SourceConfig, read_json
from ninfer.errors import ConversionError
from ninfer.models.qwen3_5.config import VisionConfig

TEMPLATE = "chat_template.jinja"
_GENERATION = "generation_config.json"
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")


def text_resources(folder: Path, config: SourceConfig) -> dict[str, bytes]:
    """Role -> bytes for the text component; ConversionError naming a file that is absent or not what it should be."""
    found = {name: _json_file(folder, name) for name in ("tokenizer.json", "tokenizer_config.json")}
    found[TEMPLATE] = _template(folder)
    if (folder / _GENERATION).exists():
        found[_GENERATION] = _json_file(folder, _GENERATION)
    elif config.eos_token_id is not None:
        found[_GENERATION] = json.dumps({"eos_token_id": config.eos_token_id}).encode()
    else:
        raise ConversionError("absent, and config.json has no eos_token_id to take its place", tensor=_GENERATION)
    return found


def vision_resources(folder: Path, vision: VisionConfig) -> dict[str, bytes]:
    """Role -> bytes for the vision component; the processors must cut patches as the tower expects them."""
    expected = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    for name in _PROCESSORS:
        processor = read_json(folder, name)
        for member, value in expected.items():
            if type(processor.get(member)) is not int or processor[member] != value:
                raise ConversionError(f"{member}: {processor.get(member)!r}, the config has {value}", tensor=name)
    return {name: _json_file(folder, name) for name in _PROCESSORS}


def _json_file(folder: Path, name: str) -> bytes:
    read_json(folder, name)
    return (folder / name).read_bytes()


def _template(folder: Path) -> bytes:
    """The file, or the template that older checkpoints keep inside the tokenizer's config."""
    path = folder / TEMPLATE
    if path.exists():
        content = path.read_bytes()
        try:
            content.decode()
        except UnicodeDecodeError:
            raise ConversionError("not UTF-8", tensor=TEMPLATE) from None
    else:
        content = _embedded_template(read_json(folder, "tokenizer_config.json").get("chat_template")).encode()
    if not content.strip():
        raise ConversionError("empty", tensor=TEMPLATE)
    return content


def _embedded_template(value: Any) -> str:
    if isinstance(value, list):  # several named templates
        value = next((item.get("template") for item in value if item.get("name") == "default"), None)
    if not isinstance(value, str):
        raise ConversionError("absent, and tokenizer_config.json has no chat_template", tensor=TEMPLATE)
    return value
