"""Every error the library raises on purpose. One root, one line of text: what, where, why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ninfer.results import GenerationResult


class NinferError(Exception):
    """Root of all errors raised by this package.

    ``partial`` is the :class:`~ninfer.GenerationResult` with what was committed, when the error ended a
    request that had started; otherwise ``None``.
    """

    partial: GenerationResult | None = None


class ArtifactError(NinferError):
    """A malformed or unsupported artifact. ``path`` is the file's name, ``where`` the place inside it."""

    def __init__(self, message: str, *, path: str = "", where: str = "") -> None:
        self.path = path
        self.where = where
        self.reason = message
        place = ": ".join(part for part in (path, where) if part)
        super().__init__(f"{place}: {message}" if place else message)


class ConversionError(NinferError):
    """A checkpoint that cannot become an artifact. ``tensor`` names the tensor or file at fault."""

    def __init__(self, message: str, *, tensor: str = "") -> None:
        self.tensor = tensor
        self.reason = message
        super().__init__(f"{tensor}: {message}" if tensor else message)


class InvalidRequest(NinferError):
    """A value refused before anything was mutated. ``field`` names it, e.g. ``"sampling.top_p"``."""

    def __init__(self, message: str, *, field: str = "") -> None:
        self.field = field
        self.reason = message
        super().__init__(f"{field}: {message}" if field else message)


class ContextOverflow(InvalidRequest):
    """The prompt is longer than the engine's context. Both numbers are tokens."""

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        super().__init__(f"{prompt_tokens} tokens exceed max_context {limit}", field="prompt")


class ToolContractError(InvalidRequest):
    """A tool declaration that cannot be honoured. ``pointer`` is a JSON Pointer into its declaration."""

    def __init__(self, message: str, *, tool: str = "", pointer: str = "", field: str = "tools") -> None:
        self.tool = tool
        self.pointer = pointer
        place = f"tool {tool!r}{' at ' + pointer if pointer else ''}: " if tool else ""
        super().__init__(place + message, field=field)


class Overloaded(NinferError):
    """The engine already holds ``max_outstanding`` requests."""


class QueueTimeout(NinferError):
    """The request waited longer than ``queue_timeout`` seconds for a lane."""


class DeadlineExceeded(NinferError):
    """The request did not finish within its ``timeout`` seconds."""


class Cancelled(NinferError):
    """The request was cancelled. Raised to whoever reads its text alone; ``result()`` returns what was committed."""


class RequestAborted(NinferError):
    """An internal fault ended this request, and with it any that shared its batch. The engine goes on serving."""

    def __init__(self, message: str, *, cause: BaseException | None = None) -> None:
        self.cause = cause
        super().__init__(message)


class ConstraintDeadEnd(NinferError):
    """A row reached a state in which no token is legal. Other rows of the batch go on."""

    def __init__(self, message: str = "no legal token", *, position: int = -1) -> None:
        self.position = position
        super().__init__(message)


class DeviceError(NinferError):
    """The device refused or failed an operation."""


class OutOfDeviceMemory(DeviceError):
    """The plan does not fit. ``plan`` maps component names to bytes; ``free`` is what was available, bytes."""

    def __init__(self, message: str, *, plan: dict[str, int] | None = None, free: int = 0) -> None:
        self.plan = dict(plan or {})
        self.free = free
        super().__init__(message)


class EngineFailed(NinferError):
    """Shared physical state can no longer be explained; every request of the engine ends with this error."""

    def __init__(self, message: str, *, cause: BaseException | None = None) -> None:
        self.cause = cause
        super().__init__(message)


class EngineClosed(NinferError):
    """The engine was closed, or is used in a process forked from its own."""


class InvariantError(EngineFailed):
    """A broken internal invariant: a bug. It fails the engine; it is never a miss, a wait or a retry."""


class StaleHandle(InvariantError):
    """An internal handle outlived the object it named."""


class ConstraintError(InvalidRequest):
    """An output constraint that cannot be enforced. ``kind`` says why in one word."""

    def __init__(self, message: str, *, kind: str, field: str = "constraint") -> None:
        self.kind = kind
        super().__init__(message, field=field)

    def within(self, field: str) -> ConstraintError:
        """This error, about another field."""
        self.field = field
        self.args = (f"{field}: {self.reason}",)
        return self


class ConstraintCombination(ConstraintError):
    """Options that contradict each other."""

    def __init__(self, message: str, *, field: str = "constraint") -> None:
        super().__init__(message, kind="combination", field=field)


class ConstraintPrefix(ConstraintError):
    """Text to continue that the constraint cannot accept. ``offset`` is the first offending byte."""

    def __init__(self, message: str, *, offset: int) -> None:
        self.offset = offset
        super().__init__(f"byte {offset}: {message}", kind="prefix")


class ConstraintLimit(ConstraintError):
    """A documented limit was passed. ``limit`` names it. Where one place did it: ``pointer`` into a schema, ``line``
    and ``column`` of its text or of a grammar, ``offset`` in a pattern; else None."""

    def __init__(
        self,
        message: str,
        *,
        limit: str,
        pointer: str | None = None,
        line: int | None = None,
        column: int | None = None,
        offset: int | None = None,
    ) -> None:
        self.limit = limit
        self.pointer = pointer
        self.line = line
        self.column = column
        self.offset = offset
        self.message = message
        places = [
            f"at {pointer!r}" if pointer is not None else "",
            f"line {line} column {column}" if line is not None else "",
            f"offset {offset}" if offset is not None else "",
        ]
        super().__init__(": ".join([*filter(None, places), message]), kind="limit")


class InvalidChoice(ConstraintError):
    """A choice list that is empty or holds something that is not text. ``index`` is None for the list itself."""

    def __init__(self, message: str, *, index: int | None = None) -> None:
        self.index = index
        super().__init__(message if index is None else f"choice {index}: {message}", kind="choice")


class InvalidRegex(ConstraintError):
    """A pattern outside the supported subset. ``offset`` counts code points from 0."""

    def __init__(self, message: str, *, offset: int) -> None:
        self.offset = offset
        super().__init__(f"offset {offset}: {message}", kind="regex")


class InvalidGrammar(ConstraintError):
    """Grammar text that cannot be used. Line and column count from 1, columns in code points."""

    def __init__(self, message: str, *, line: int, column: int) -> None:
        self.line = line
        self.column = column
        super().__init__(f"line {line} column {column}: {message}", kind="grammar")


class InvalidSchema(ConstraintError):
    """A schema that is not one. ``pointer`` is a JSON Pointer; line and column are known for text sources."""

    def __init__(self, message: str, *, pointer: str = "", line: int | None = None, column: int | None = None) -> None:
        self.pointer = pointer
        self.line = line
        self.column = column
        place = f"line {line} column {column}" if line is not None else f"at {pointer!r}"
        super().__init__(f"{place}: {message}", kind="schema")


class UnsupportedSchema(ConstraintError):
    """An assertion that cannot be enforced. ``keyword`` names it, ``related`` holds further pointers."""

    def __init__(self, message: str, *, pointer: str = "", keyword: str = "", related: tuple[str, ...] = ()) -> None:
        self.pointer = pointer
        self.keyword = keyword
        self.related = related
        also = f" (see {', '.join(map(repr, related))})" if related else ""
        super().__init__(f"at {pointer!r}: {message}{also}", kind="unsupported")


class UnsatisfiableSchema(ConstraintError):
    """No value satisfies the schema, or no text the constraint."""

    def __init__(self, message: str, *, pointer: str = "") -> None:
        self.pointer = pointer
        super().__init__(f"at {pointer!r}: {message}", kind="unsatisfiable")
