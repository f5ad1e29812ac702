"""ninfer: embeddable inference for the Qwen3.5 family.

``Engine`` opens a model; ``engine.submit`` returns a ``GenerationHandle``, which yields ``GenerationStart``, ``Delta``
and ``ToolCallEvent`` values and ends with a ``GenerationResult``. Every error is a ``NinferError``.
"""

import logging
from typing import TYPE_CHECKING, Any

from ninfer.engine import Engine
from ninfer.errors import (
    ArtifactError,
    Cancelled,
    ConstraintDeadEnd,
    ContextOverflow,
    ConversionError,
    DeadlineExceeded,
    DeviceError,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    InvariantError,
    NinferError,
    OutOfDeviceMemory,
    Overloaded,
    QueueTimeout,
    RequestAborted,
    StaleHandle,
    ToolContractError,
)
from ninfer.handle import GenerationHandle
from ninfer.inputs import Chat, Message, TextPrompt, TokenPrompt, Tool
from ninfer.options import EngineOptions, RequestOptions, SamplingParams
from ninfer.results import (
    Delta,
    GenerationResult,
    GenerationStart,
    SpeculationStats,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallEvent,
    Usage,
)
from ninfer.runtime.metrics import EngineStats

if TYPE_CHECKING:
    from ninfer.frontend import PreparedPrompt

__version__ = "0.1.0"
__all__ = [
    "ArtifactError",
    "Cancelled",
    "Chat",
    "ConstraintDeadEnd",
    "ContextOverflow",
    "ConversionError",
    "DeadlineExceeded",
    "Delta",
    "DeviceError",
    "Engine",
    "EngineClosed",
    "EngineFailed",
    "EngineOptions",
    "EngineStats",
    "GenerationHandle",
    "GenerationResult",
    "GenerationStart",
    "InvalidRequest",
    "InvariantError",
    "Message",
    "NinferError",
    "OutOfDeviceMemory",
    "Overloaded",
    "PreparedPrompt",
    "QueueTimeout",
    "RequestAborted",
    "RequestOptions",
    "SamplingParams",
    "SpeculationStats",
    "StaleHandle",
    "TextPrompt",
    "Timings",
    "TokenLogprob",
    "TokenPrompt",
    "Tool",
    "ToolCall",
    "ToolCallEvent",
    "ToolContractError",
    "Usage",
    "__version__",
]

logging.getLogger("ninfer").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """What would make importing the package slow comes when it is first named."""
    if name == "PreparedPrompt":
        from ninfer.frontend import PreparedPrompt

        return PreparedPrompt
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
