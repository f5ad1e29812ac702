"""Jinja that cannot hang, exhaust memory or escape, whatever the template says.

Chat templates come with models and are not trusted. They run in Jinja's immutable sandbox, which closes the
way out, under a work budget, which closes the rest. The budget is a plain counter, so it works in any thread
and does not depend on the clock. What each operation costs, in units:

* one unit per loop iteration, plus the literal text of the loop's body / 8; loops are charged before they
start;
* eight units per filter, test, call or operator, plus the size of what goes in and comes out;
* the size of a value is one unit per element, however deep, plus characters / 8.

An operation whose result could be far larger than its operands (repetition, padding, number formats, powers,
ranges, replacement, joining) is charged before it runs. A render may spend ``WORK + WORK_PER_CHARACTER *
(characters of the caller's values)`` units, nest calls ``MAX_DEPTH`` deep, and produce numbers of
``MAX_BITS`` bits. A template is at most ``MAX_SOURCE`` characters. Inheritance, imports and blocks are
refused, as are globals, filters and methods that chat templates have no use for.
"""

from __future__ import annotations

import operator
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context

WORK = 1_000_000
WORK_PER_CHARACTER = 16
MAX_DEPTH = 64
MAX_BITS = 4096
MAX_SOURCE = 1 << 20

_STEP = 8
_LISTS: tuple[Any, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))
_LOOPABLE: tuple[Any, ...] = (*_LISTS, str, dict, range)


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

    def weigh(self, value: Any) -> None:
        """Spend the size of a value. Shared parts count each time, because printing would repeat them."""
        stack = [value]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                self.spend(1 + len(item) // 8)
            elif isinstance(item, _LISTS):
                self.spend(1 + len(item))
                stack.extend(item)
            elif isinstance(item, dict):
                self.spend(1 + 2 * len(item))
                stack.extend(item.keys())
                stack.extend(item.values())
            elif isinstance(item, range):
                self.spend(1 + len(item))
            else:
                self.spend(1)


_budget: ContextVar[Budget] = ContextVar("template_budget")


# -- operations that can outgrow their operands --------------------------------------------------------------


def _charge_growth(budget: Budget, name: str, text: str, args: Sequence[Any]) -> None:
    """Spend the size of the result of a string method whose result its operands do not bound."""
    if name == "replace" and len(args) > 1 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.spend(text.count(args[0]) * max(0, len(args[1]) - len(args[0])) // 8)
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.spend(max(0, args[0]) // 8)
    elif name == "expandtabs" and args and isinstance(args[0], int):
        budget.spend(text.count("\t") * max(0, args[0]) // 8)
    elif name == "join" and args:
        _charge_join(budget, text, args[0])


def _charge_join(budget: Budget, separator: Any, values: Any) -> None:
    if isinstance(separator, str) and hasattr(values, "__len__"):
        budget.spend(len(separator) * len(values) // 8)


_WIDE = re.compile(r"\d{4,}|\*")


def _check_percent(template: str) -> None:
    if any(_WIDE.search(field) for field in re.findall(r"%[^a-zA-Z%]*", template)):
        raise TemplateLimit("the chat template formats with a width above 999")


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if re.search(r"\d{4,}", format_spec):
            raise TemplateLimit("the chat template formats with a width above 999")
        _budget.get().weigh(value)
        return str(super().format_field(value, format_spec))


def _bits(value: Any) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _check_number(symbol: str, left: Any, right: Any) -> None:
    if symbol == "**" and isinstance(left, int) and isinstance(right, int):
        size = _bits(left) * max(right, 1)
    else:
        size = _bits(left) + _bits(right)
    if size > MAX_BITS:
        raise TemplateLimit("the chat template computes with a huge number")


_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "**": operator.pow, "%": operator.mod,
}  # fmt: skip

# -- what a template may call --------------------------------------------------------------------------------

_METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset(
        [
            "capitalize",
            "casefold",
            "center",
            "count",
            "endswith",
            "expandtabs",
            "find",
            "index",
            "isalnum",
            "isalpha",
            "isascii",
            "isdecimal",
            "isdigit",
            "islower",
            "isnumeric",
            "isspace",
            "istitle",
            "isupper",
            "join",
            "ljust",
            "lower",
            "lstrip",
            "partition",
            "removeprefix",
            "removesuffix",
            "replace",
            "rfind",
            "rindex",
            "rjust",
            "rpartition",
            "rsplit",
            "rstrip",
            "split",
            "splitlines",
            "startswith",
            "strip",
            "swapcase",
            "title",
            "upper",
            "zfill",
        ]
    ),
    dict: frozenset(["get", "items", "keys", "values", "copy"]),
    list: frozenset(["count", "index", "copy"]),
    tuple: frozenset(["count", "index"]),
    LoopContext: frozenset(["cycle", "changed"]),
}

_FREE = frozenset(["count", "d", "default", "first", "float", "int", "items", "last", "length", "abs", "round", "safe"])
_TEXT = frozenset(
    [
        "capitalize",
        "e",
        "escape",
        "format",
        "indent",
        "join",
        "list",
        "lower",
        "map",
        "max",
        "min",
        "reject",
        "rejectattr",
        "replace",
        "reverse",
        "select",
        "selectattr",
        "sort",
        "string",
        "sum",
        "title",
        "trim",
        "truncate",
        "unique",
        "upper",
        "dictsort",
        "groupby",
    ]
)
_TESTS_BY_SIZE = frozenset(
    [
        "in",
        "==",
        "eq",
        "equalto",
        "!=",
        "ne",
        ">",
        "gt",
        "greaterthan",
        "ge",
        ">=",
        "<",
        "lt",
        "lessthan",
        "<=",
        "le",
        "lower",
        "upper",
    ]
)
_ORDERING = frozenset(["sort", "unique", "min", "max", "dictsort", "groupby"])


def _inject(function: Callable[..., Any], context: Context) -> tuple[Any, ...]:
    """The extra first argument that Jinja's own filters and tests ask for by decoration."""
    kind = getattr(function, "jinja_pass_arg", None)
    choices = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
    return () if kind is None else (choices[kind.name],)


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def run(context: Context, value: Any = "", *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        if name not in _FREE:
            budget.weigh((value, *args, *kwargs.values()))
            _charge_filter(budget, name, value, args, kwargs)
        result = function(*_inject(function, context), value, *args, **kwargs)
        if isinstance(result, Iterator):
            result = list(result)
        if name not in _FREE:
            budget.weigh(result)
        return result

    return run


def _charge_filter(budget: Budget, name: str, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if name == "format":
        _check_percent(str(value))
    elif name == "replace":
        _charge_growth(budget, "replace", str(value), [*map(str, args), *map(str, kwargs.values())])
    elif name == "join":
        _charge_join(budget, kwargs.get("d", args[0] if args else ""), value)
    elif name == "indent":
        width = kwargs.get("width", args[0] if args else 4)
        columns = len(width) if isinstance(width, str) else max(0, int(width))
        budget.spend((1 + str(value).count("\n")) * columns // 8)
    elif name in _ORDERING and hasattr(value, "__len__"):
        for _ in range(len(value).bit_length()):
            budget.weigh(value)


def _metered_test(name: str, function: Callable[..., Any]) -> Callable[..., bool]:
    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> bool:
        budget = _budget.get()
        budget.spend(_STEP)
        if name in _TESTS_BY_SIZE:
            budget.weigh((value, *args))
        return bool(function(*_inject(function, context), value, *args, **kwargs))

    return run


# -- nodes put into the compiled template --------------------------------------------------------------------


@pass_context
def _charge_loop(_: Context, iterable: Any, per_item: int) -> Any:
    """Charge a whole loop before it starts and hand its iterable on."""
    budget = _budget.get()
    if isinstance(iterable, Undefined):
        return iterable
    if not isinstance(iterable, _LOOPABLE):
        raise TemplateRuntimeError(f"cannot loop over {type(iterable).__name__}")
    budget.spend(_STEP + len(iterable) * per_item)
    return iterable


@pass_context
def _charge_text(_: Context, units: int) -> None:
    _budget.get().spend(units)


@pass_context
def _weigh_operand(_: Context, value: Any) -> Any:
    _budget.get().weigh(value)
    return value


@pass_context
def _concatenate(_: Context, values: list[Any]) -> str:
    budget = _budget.get()
    budget.weigh(values)
    result = str_join(values)
    budget.weigh(result)
    return result


_REFUSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def _literal_units(node: nodes.Node) -> int:
    return 1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData)) // 8


def _meter(node: Any) -> Any:
    """Rewrite a parsed template so that its loops, macros, ``~``, comparisons and slices are charged."""
    if isinstance(node, _REFUSED):
        raise TemplateRuntimeError(f"{type(node).__name__.lower()} is not available to chat templates")
    for field, value in list(node.iter_fields()):
        if isinstance(value, nodes.Node):
            setattr(node, field, _meter(value))
        elif isinstance(value, list):
            setattr(node, field, [_meter(item) if isinstance(item, nodes.Node) else item for item in value])
    line = node.lineno
    if isinstance(node, nodes.For):
        node.iter = _through("_loop", node.iter, line, nodes.Const(_literal_units(node)))
    elif isinstance(node, nodes.Macro | nodes.CallBlock):
        node.body.insert(0, nodes.ExprStmt(_through("_text", nodes.Const(_literal_units(node)), line), lineno=line))
    elif isinstance(node, nodes.Concat):
        return _through("_concat", nodes.List(node.nodes, lineno=line), line)
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _through("_weigh", node, line)
    elif isinstance(node, nodes.Compare):
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
    return node


def _weighed(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through("_weigh", node, node.lineno)


def _through(name: str, node: Any, line: int, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=line)


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment Hugging Face templates expect, metered. See the module's text for the limits."""

    intercepted_binops = frozenset(_BINARY)

    def __init__(self, functions: Mapping[str, Callable[..., Any]], filters: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            optimized=False,
            finalize=_finalize,
        )
        self.globals = {"range": range, "namespace": Namespace, "dict": _dict, **functions}
        self._functions = frozenset(map(id, self.globals.values()))
        allowed = {name: FILTERS[name] for name in _FREE | _TEXT} | dict(filters)
        self.filters = {name: _metered_filter(name, function) for name, function in allowed.items()}
        self.filters |= {
            "_loop": _charge_loop, "_text": _charge_text, "_weigh": _weigh_operand, "_concat": _concatenate,
        }  # fmt: skip
        tests: Mapping[str, Any] = dict(TESTS)
        self.tests = {name: _metered_test(name, function) for name, function in tests.items()}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _meter(source)
        return super()._generate(source, *args, **kwargs)

    def render(self, template: Any, variables: Mapping[str, Any], *, characters: int) -> str:
        """Run a compiled template over plain values. ``characters``: their size, which widens the budget."""
        token = _budget.set(Budget(WORK + WORK_PER_CHARACTER * characters))
        try:
            return "".join(template.root_render_func(template.new_context(dict(variables))))
        finally:
            _budget.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        _check_number(operator, left, right)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    budget.spend(len(value) * max(0, times))
        if operator == "%" and isinstance(left, str):
            _check_percent(left)
            budget.weigh(right)
        if operator == "+" and isinstance(left, list | tuple):
            budget.spend(len(left) + (len(right) if isinstance(right, list | tuple) else 0))
        result = _BINARY[operator](left, right)
        if isinstance(result, str):
            budget.weigh(result)
        return result

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.spend(_STEP)
        arguments = [*args, *(value for key, value in kwargs.items() if not key.startswith("_"))]
        if isinstance(obj, LoopContext):
            args = (_charge_loop(context, args[0], 1), *args[1:]) if args else args
        elif not isinstance(obj, Macro | Undefined):
            self._charge_call(budget, obj, arguments)
        budget.depth += 1
        if budget.depth > MAX_DEPTH:
            raise TemplateLimit("the chat template nests calls too deep")
        result = super().call(context, obj, *args, **kwargs)
        budget.depth -= 1
        if isinstance(result, str | list | tuple):
            budget.weigh(result)
        return result

    def _charge_call(self, budget: Budget, function: Any, arguments: list[Any]) -> None:
        owner = getattr(function, "__self__", None)
        name = getattr(function, "__name__", "")
        if isinstance(owner, str | dict | list | tuple | LoopContext):
            kind = next(kind for kind in _METHODS if isinstance(owner, kind))
            if name not in _METHODS[kind]:
                raise SecurityError(f"method {name!r} is not available to chat templates")
            if kind is not dict:
                budget.weigh(owner if not isinstance(owner, LoopContext) else "")
                budget.weigh(arguments)
            if isinstance(owner, str):
                _charge_growth(budget, name, owner, arguments)
        elif getattr(function, "bounded", False) or id(function) in self._functions:
            budget.weigh(arguments)
        else:
            raise SecurityError(f"{type(function).__name__} is not callable in chat templates")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        bound = isinstance(value, types.MethodType | types.BuiltinMethodType)
        if not bound or value.__name__ not in ("format", "format_map") or not isinstance(value.__self__, str):
            return None
        template, mapped = str(value.__self__), value.__name__ == "format_map"

        def fill(*args: Any, **kwargs: Any) -> str:
            return _Formatter(self).vformat(template, () if mapped else args, args[0] if mapped else kwargs)

        fill.bounded = True  # type: ignore[attr-defined]
        return fill


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


@pass_context
def _finalize(_: Context, value: Any) -> Any:
    """What an expression prints. Only plain values have a text form a template may use."""
    if not isinstance(value, str | int | float | list | tuple | dict | Undefined | None):
        raise TemplateRuntimeError(f"a chat template cannot print {type(value).__name__}")
    _budget.get().weigh(value)
    return value
