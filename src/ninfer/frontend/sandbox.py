"""Jinja that cannot hang, exhaust memory or escape, whatever the template says.

Chat templates come with models and are not trusted. They run in Jinja's immutable sandbox, which closes the way out,
under a work budget (``budget``), which closes the rest: compiled templates are rewritten so that every loop, macro,
call, operator, filter, test and printed value is charged before or as it happens. A template is at most
``MAX_SOURCE`` characters. Inheritance, imports and blocks are refused, as are the globals, filters and methods that
chat templates have no use for.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.tests import TESTS
from jinja2.utils import Namespace, pass_context

from ninfer.frontend import budget as costs
from ninfer.frontend.budget import Budget, TemplateLimit, current

MAX_SOURCE = 1 << 20

_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "//": operator.floordiv,
    "**": operator.pow, "%": operator.mod,
}  # fmt: skip


# -- nodes put into the compiled template --------------------------------------------------------------------


@pass_context
def _charge_loop(_: Context, iterable: Any, per_item: int) -> Any:
    """Charge a whole loop before it starts and hand its iterable on."""
    budget = current.get()
    if isinstance(iterable, Undefined):
        return iterable
    if not isinstance(iterable, costs.LOOPABLE):
        raise TemplateRuntimeError(f"cannot loop over {type(iterable).__name__}")
    budget.spend(costs.STEP + len(iterable) * per_item)
    return iterable


@pass_context
def _charge_text(_: Context, units: int) -> None:
    current.get().spend(units)


@pass_context
def _weigh_operand(_: Context, value: Any) -> Any:
    current.get().weigh(value)
    return value


@pass_context
def _concatenate(_: Context, values: list[Any]) -> str:
    budget = current.get()
    budget.weigh(values)
    result = str_join(values)
    budget.weigh(result)
    return result


_REFUSED = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)


def _literal_units(node: nodes.Node) -> int:
    return 1 + sum(len(text.data) for text in node.find_all(nodes.TemplateData)) // 4


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
    for expanded in ("dyn_args", "dyn_kwargs"):
        if getattr(node, expanded, None) is not None:
            setattr(node, expanded, _weighed(getattr(node, expanded)))
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


class _Formatter(SandboxedFormatter):
    """``str.format``: attribute access as in templates, widths bounded, values weighed before they are spelled."""

    def format_field(self, value: Any, format_spec: str) -> str:
        costs.check_width(format_spec)
        current.get().weigh(value)
        return str(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        current.get().weigh(value)
        return super().convert_field(value, conversion)


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
        known = {name: FILTERS[name] for name in costs.FILTERS_BY_STEP | costs.FILTERS_BY_SIZE} | dict(filters)
        self.filters = {name: costs.metered_filter(name, function) for name, function in known.items()}
        self.filters |= {
            "_loop": _charge_loop, "_text": _charge_text, "_weigh": _weigh_operand, "_concat": _concatenate,
        }  # fmt: skip
        tests: Mapping[str, Any] = dict(TESTS)
        self.tests = {name: costs.metered_test(name, function) for name, function in tests.items()}

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _meter(source)
        return super()._generate(source, *args, **kwargs)

    def render(self, template: Any, variables: Mapping[str, Any], *, characters: int) -> str:
        """Run a compiled template over plain values. ``characters``: their size, which widens the budget."""
        token = current.set(Budget(costs.WORK + costs.WORK_PER_CHARACTER * characters))
        try:
            return "".join(template.root_render_func(template.new_context(dict(variables))))
        finally:
            current.reset(token)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current.get()
        budget.spend(costs.STEP)
        costs.check_binary(budget, operator, left, right)
        result = _BINARY[operator](left, right)
        if isinstance(result, str):
            budget.weigh(result)
        return result

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = current.get()
        budget.spend(costs.STEP)
        arguments = [*args, *(value for key, value in kwargs.items() if not key.startswith("_"))]
        if isinstance(obj, LoopContext):
            args = (_charge_loop(context, args[0], 1), *args[1:]) if args else args
        elif not isinstance(obj, Macro | Undefined):
            self._charge_call(budget, obj, arguments)
        budget.depth += 1
        if budget.depth > costs.MAX_DEPTH:
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
            kind = next(kind for kind in costs.METHODS if isinstance(owner, kind))
            if name not in costs.METHODS[kind]:
                raise SecurityError(f"method {name!r} is not available to chat templates")
            if kind is not dict:
                budget.weigh(owner if not isinstance(owner, LoopContext) else "")
                budget.weigh(arguments)
            if isinstance(owner, str):
                costs.check_growth(budget, name, owner, arguments)
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
    current.get().weigh(value)
    return value
