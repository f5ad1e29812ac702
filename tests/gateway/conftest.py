"""A small random model in a file."""

from __future__ import annotations

import pytest

from ninfer.artifact import write_artifact
from ninfer.models.qwen3_5.synthetic import synthetic_source


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "random.ninfer"
    source = synthetic_source("tiny", "q8")
    objects = source.directory.objects
    write_artifact(path, source.directory, lambda name: [(0, source.view(objects[name].offset, objects[name].nbytes))])
    return path
