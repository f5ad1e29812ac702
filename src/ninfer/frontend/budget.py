"""What a chat template's work costs, and what it may use at all.

The budget is a plain counter, so it works in any thread and does not depend on the clock. In units:

* one unit per loop iteration, plus the literal text of the loop's body / 4; loops are charged before they start;
* eight units per filter, test, call or operator, plus the size of what goes in and comes out;
* the size of a value is one unit per element, however deep, plus characters / 4.

An operation whose result could be far larger than its operands (repetition, padding, number formats, powers, ranges,
replacement, joining) is charged, or checked, before it runs. A render may spend ``WORK + WORK_PER_CHARACTER *
(characters of the caller's values)`` units, nest calls ``MAX_DEPTH`` deep, and compute with numbers of ``MAX_BITS``
bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
from jinja2.exceptions import TemplateRuntimeError
from jinja2.runtime import Context, LoopContext
from jinja2.utils import Namespace, pass_context

WORK = 1_000_000
WORK_PER_CHARACTER = 16
MAX_DEPTH = 64
MAX_BITS = 4096
STEP = 8
"""Units of one filter, test, call or operator."""

_CHARACTERS_PER_UNIT = 4
_MAX_WIDTH = 999
_MAX_PRECISION = 20
_LISTS: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
LOOPABLE: tuple[Any, ...] = (*_LISTS, str, dict, range)

METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset([
        "capitalize", "casefold", "center", "count", "endswith", "expandtabs", "find", "index", "isalnum", "isalpha",
        "isascii", "isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "ljust",
        "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
        "zfill",
    ]),
    dict: frozenset(["get", "items", "keys", "values", "copy"]),
    list: frozenset(["count", "index", "copy"]),
    tuple: frozenset(["count", "index"]),
    LoopContext: frozenset(["cycle", "changed"]),
}  # fmt: skip
"""Methods a template may call, by the type of their object."""

FILTERS_BY_STEP = frozenset([
    "abs", "count", "d", "default", "first", "float", "int", "items", "last", "length", "round", "safe",
])  # fmt: skip
FILTERS_BY_SIZE = frozenset([
    "capitalize", "dictsort", "e", "escape", "format", "groupby", "indent", "join", "list", "lower", "map", "max",
    "min", "reject", "rejectattr", "replace", "reverse", "select", "selectattr", "sort", "string", "sum", "title",
    "trim", "truncate", "unique", "upper",
])  # fmt: skip
_TESTS_BY_SIZE = frozenset([
    "in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", "ge", ">=", "<", "lt", "lessthan", "<=", "le",
    "lower", "upper",
])  # fmt: skip
_ORDERING = frozenset(["sort", "unique", "min", "max", "dictsort", "groupby"])


class TemplateLimit(TemplateRuntimeError):
    """The template asked for more work than a render may do."""


@attrs.define
class Budget:
    """What one render may still spend."""

    left: int
    depth: int = 0

    def spend(self, units: int) -> None:
        self.left -= units
        if self.left < 0:
            raise TemplateLimit("the chat template does too much work")

    def characters(self, count: int) -> None:
        """Spend the cost of text of this length."""
        self.spend(max(0, count) // _CHARACTERS_PER_UNIT)

    def weigh(self, value: Any) -> None:
        """Spend the size of a value. Shared parts count each time, because printing would repeat them."""
        stack = [value]
        while stack:
            item = stack.pop()
            self.spend(1)
            if isinstance(item, str):
                self.characters(len(item))
            elif isinstance(item, _LISTS):
                self.spend(len(item))
                stack.extend(item)
            elif isinstance(item, dict):
                self.spend(2 * len(item))
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, range):
                self.spend(len(item))
            elif isinstance(item, Namespace):
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))


current: ContextVar[Budget] = ContextVar("template_budget")
"""The budget of the render that is running."""


# -- operations that can outgrow their operands --------------------------------------------------------------


def check_growth(budget: Budget, name: str, text: str, args: Sequence[Any]) -> None:
    """Spend what a string method may cost or produce beyond its operands' size."""
    first = args[0] if args else None
    if name == "replace" and len(args) > 1 and isinstance(first, str) and isinstance(args[1], str):
        budget.characters(text.count(first) * (len(args[1]) - len(first)))
    elif name in ("center", "ljust", "rjust", "zfill") and isinstance(first, int):
        budget.characters(first)
    elif name == "expandtabs" and isinstance(first, int):
        budget.characters(text.count("\t") * first)
    elif name == "join":
        _check_join(budget, text, first)
    elif name in ("strip", "lstrip", "rstrip", "trim") and isinstance(first, str):
        budget.characters(len(text) * len(first))


def _check_join(budget: Budget, separator: Any, values: Any) -> None:
    if isinstance(separator, str) and hasattr(values, "__len__"):
        budget.characters(len(separator) * len(values))


_PERCENT = re.compile(r"%%|%(?:\([^()]*\))?[-#0 +]*(\*|\d+)?(?:\.(\*|\d+))?")


def check_percent(template: str) -> None:
    """Refuse ``%`` formats whose width the operands do not bound."""
    for field in _PERCENT.finditer(template):
        for width in field.groups():
            check_width(width or "0")
        if template.startswith("(", field.end()):
            raise TemplateLimit("the chat template formats with a nested key")


def check_width(spec: str) -> None:
    """Refuse a format spec that pads beyond a line's length."""
    if spec == "*" or any(int(run) > _MAX_WIDTH for run in re.findall(r"\d{1,9}", spec)):
        raise TemplateLimit(f"the chat template formats with a width above {_MAX_WIDTH}")


def check_binary(budget: Budget, symbol: str, left: Any, right: Any) -> None:
    """Spend, before it is computed, what a binary operator may produce."""
    bits = _bits(left) + _bits(right)
    if symbol == "**" and isinstance(left, int) and isinstance(right, int):
        bits = _bits(left) * max(right, 1)
    if bits > MAX_BITS:
        raise TemplateLimit("the chat template computes with a huge number")
    if symbol == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                budget.spend(len(value) * max(0, times))
    elif symbol == "%" and isinstance(left, str):
        check_percent(left)
        budget.weigh(right)
    elif symbol == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget.spend(len(left) + len(right))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_filter(budget: Budget, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """As ``check_growth``, for filters; ``value`` and the arguments have been weighed."""
    if name == "format":
        check_percent(str(value))
    elif name in ("replace", "trim"):
        check_growth(budget, name, str(value), [*map(str, args), *map(str, kwargs.values())])
    elif name == "join":
        _check_join(budget, kwargs.get("d", args[0] if args else ""), value)
    elif name == "indent":
        width = kwargs.get("width", args[0] if args else 4)
        columns = len(width) if isinstance(width, str) else int(width)
        budget.characters((1 + str(value).count("\n")) * columns)
    elif name == "sum" and not isinstance(kwargs.get("start", args[1] if len(args) > 1 else 0), int | float):
        raise TemplateLimit("in a chat template, sum adds numbers only")
    elif name in _ORDERING and hasattr(value, "__len__"):
        for _ in range(len(value).bit_length()):
            budget.weigh(value)


# -- filters and tests ---------------------------------------------------------------------------------------


def metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, charged. Lazy results become lists, so that every value has a size."""

    @pass_context
    def run(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.spend(STEP)
        if name not in FILTERS_BY_STEP:
            budget.weigh((value, *args, *kwargs.values()))
            _check_filter(budget, name, value, args, kwargs)
        elif name == "round" and abs(int(kwargs.get("precision", args[0] if args else 0))) > _MAX_PRECISION:
            raise TemplateLimit(f"the chat template rounds to more than {_MAX_PRECISION} digits")
        result = function(*_inject(function, context), value, *args, **kwargs)
        if isinstance(result, Iterator):
            result = list(result)
        if name not in FILTERS_BY_STEP:
            budget.weigh(result)
        return result

    return run


def metered_test(name: str, function: Callable[..., Any]) -> Callable[..., bool]:
    """The test, charged."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> bool:
        budget = current.get()
        budget.spend(STEP)
        if name in _TESTS_BY_SIZE:
            budget.weigh((value, *args, *kwargs.values()))
        return bool(function(*_inject(function, context), value, *args, **kwargs))

    return run


def _inject(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """The extra first argument that Jinja's own filters and tests ask for by decoration."""
    kind = getattr(function, "jinja_pass_arg", None)
    choices = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return () if kind is None else (choices[kind.name],)
