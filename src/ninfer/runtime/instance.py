"""An opened model: everything behind an engine, in the order in which it is taken down again."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ninfer.contract import ProgramPort
from ninfer.options import EngineOptions

if TYPE_CHECKING:
    from ninfer.artifact import ArtifactSource
    from ninfer.frontend import Frontend


@dataclass(frozen=True, slots=True)
class Instance:
    """max_context: tokens of one sequence. prefill_chunk: tokens of one unit. ``close`` frees everything, once."""

    frontend: Frontend
    program: ProgramPort
    model_name: str
    device_name: str
    max_context: int
    prefill_chunk: int
    close: Callable[[], None]


def open_instance(artifact: str | os.PathLike[str] | ArtifactSource, options: EngineOptions) -> Instance:
    raise NotImplementedError
