"""A small artifact with every format, written to disk, and its pieces for tests that damage it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ninfer.artifact import (
    Binding,
    Component,
    Directory,
    Part,
    Proposal,
    RandomTensor,
    SyntheticSource,
    Use,
    write_artifact,
)
from ninfer.artifact.framing import ENTRY_MAGIC, HEADER_BYTES, pack_header, payload_start

Image = tuple[dict[str, Any], bytes]


@pytest.fixture(scope="session")
def sample() -> SyntheticSource:
    """Every format once, a fused parent, resources, a divisor, two components and a draft head. About 25 kB."""
    fused = (("text/query", (6, 130)), ("text/key", (2, 130)))
    tensors = [
        RandomTensor("q4_g64_fp16", fused),
        RandomTensor("q5_g64_fp16", (("text/up", (5, 200)),)),
        RandomTensor("q6_g64_fp16", (("text/down", (3, 64)),)),
        RandomTensor("q8_g32_fp16", (("text/head", (4, 96)),)),
        RandomTensor("fp8_e4m3fn_row_bf16", (("text/z", (3, 70)),)),
        RandomTensor("nvfp4", (("text/gate", (256, 128)),)),
        RandomTensor("bf16", (("text/norm", (130,)),), mean=1.0, std=0.1),
        RandomTensor("fp32", (("text/a_log", (7,)),)),
        RandomTensor("int32", (("proposal/token_ids", (9,)),)),
        RandomTensor("bf16", (("vision/bias", (11,)),)),
        RandomTensor("fp32", (("text/divisor", ()),), values=np.array(3.5, np.float32)),
    ]
    divisor = Binding((Part("weight/000010", 0, 1),), whole=True)
    uses = [Use("text/gate", "text/in", "AllowA4", {"activation_input_divisor": divisor})]
    uses += [Use(f"text/{name}", "text/in", "A16Only") for name in ("query", "key", "up", "down", "head", "z")]
    return SyntheticSource(
        tensors,
        components={
            "text": Component({"architectures": ["Example"]}, proposal=Proposal("indexed", 9)),
            "vision": Component({"depth": 1, "list": [1.5, {"a": None}]}, target="text"),
        },
        resources={("text", "tokenizer.json"): b'{"a":1}', ("vision", "preprocessor_config.json"): b"{}"},
        uses=uses,
        metadata={"name": "exämple"},
    )


@pytest.fixture(scope="session")
def write_sample(sample: SyntheticSource) -> Callable[..., Directory]:
    """Write the sample: ``write_sample(path, max_file_bytes=...)``."""

    def write(path: Path, **options: Any) -> Directory:
        objects = sample.directory.objects
        return write_artifact(
            path,
            sample.directory,
            lambda name: [(0, sample.view(objects[name].offset, objects[name].nbytes))],
            **options,
        )

    return write


@pytest.fixture(scope="session")
def image(write_sample: Callable[..., Directory], tmp_path_factory: pytest.TempPathFactory) -> Image:
    """The sample's JSON directory and its payload."""
    path = tmp_path_factory.mktemp("sample") / "sample.ninfer"
    write_sample(path)
    whole = path.read_bytes()
    json_bytes = int.from_bytes(whole[8:16], "little")
    root = json.loads(whole[HEADER_BYTES : HEADER_BYTES + json_bytes])
    return root, whole[payload_start(json_bytes) :]


@pytest.fixture(scope="session")
def frame() -> Callable[[str | bytes, bytes], bytes]:
    """The bytes of an entry file around any JSON text and payload."""

    def build(text: str | bytes, payload: bytes) -> bytes:
        encoded = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        head = pack_header(ENTRY_MAGIC, len(encoded), bytes(range(16))) + encoded
        return head.ljust(payload_start(len(encoded)), b"\0") + payload

    return build
