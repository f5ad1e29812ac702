"""ninfer: embeddable inference for the Qwen3.5 family.

``Engine`` opens a model; ``engine.submit`` returns a ``GenerationHandle``, which yields ``GenerationStart``, ``Delta``
and ``ToolCallEvent`` values and ends with a ``GenerationResult``. Every error is a ``NinferError``.
"""

import logging
from typing import TYPE_CHECKING, Any

from ninfer.cache import ContextCache, MemoryMap
from ninfer.engine import Engine
from ninfer.errors import (
    ArtifactError,
    Cancelled,
    ConstraintCombination,
    ConstraintDeadEnd,
    ConstraintError,
    ConstraintLimit,
    ConstraintPrefix,
    ContextOverflow,
    ConversionError,
    DeadlineExceeded,
    DeviceError,
    EngineClosed,
    EngineFailed,
    InvalidChoice,
    InvalidGrammar,
    InvalidRegex,
    InvalidRequest,
    InvalidSchema,
    InvariantError,
    NinferError,
    OutOfDeviceMemory,
    Overloaded,
    QueueTimeout,
    RequestAborted,
    StaleHandle,
    ToolContractError,
    UnsatisfiableSchema,
    UnsupportedSchema,
)
from ninfer.handle import GenerationHandle
from ninfer.inputs import Chat, Message, TextPrompt, TokenPrompt, Tool
from ninfer.options import CacheOptions, EngineOptions, RequestOptions, SamplingParams, SpecOptions, ToolChoice
from ninfer.results import (
    ConstraintReport,
    Delta,
    GenerationResult,
    GenerationStart,
    PauseOutcome,
    SpeculationStats,
    Timings,
    TokenLogprob,
    ToolCall,
    ToolCallEvent,
    Usage,
)
from ninfer.runtime.metrics import EngineStats
from ninfer.runtime.reuse import ContextStats

if TYPE_CHECKING:
    from ninfer.constraints import OutputConstraint
    from ninfer.frontend import PreparedPrompt

__version__ = "0.1.0"
__all__ = [
    "ArtifactError",
    "CacheOptions",
    "Cancelled",
    "Chat",
    "ConstraintCombination",
    "ConstraintDeadEnd",
    "ConstraintError",
    "ConstraintLimit",
    "ConstraintPrefix",
    "ConstraintReport",
    "ContextCache",
    "ContextOverflow",
    "ContextStats",
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
    "InvalidChoice",
    "InvalidGrammar",
    "InvalidRegex",
    "InvalidRequest",
    "InvalidSchema",
    "InvariantError",
    "MemoryMap",
    "Message",
    "NinferError",
    "OutOfDeviceMemory",
    "OutputConstraint",
    "Overloaded",
    "PauseOutcome",
    "PreparedPrompt",
    "QueueTimeout",
    "RequestAborted",
    "RequestOptions",
    "SamplingParams",
    "SpecOptions",
    "SpeculationStats",
    "StaleHandle",
    "TextPrompt",
    "Timings",
    "TokenLogprob",
    "TokenPrompt",
    "Tool",
    "ToolCall",
    "ToolCallEvent",
    "ToolChoice",
    "ToolContractError",
    "UnsatisfiableSchema",
    "UnsupportedSchema",
    "Usage",
    "__version__",
]

logging.getLogger("ninfer").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """What would make importing the package slow comes when it is first named."""
    if name == "PreparedPrompt":
        from ninfer.frontend import PreparedPrompt

        return PreparedPrompt
    if name == "OutputConstraint":
        from ninfer.constraints import OutputConstraint

        return OutputConstraint
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
