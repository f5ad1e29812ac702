"""The language of tool calls in the model's own envelope, written for a set of contracts and a policy.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The newlines are framing: exactly these, and every other one belongs to a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from ninfer.constraints.automata import Dfa
from ninfer.constraints.compose import PhaseMarker, free_text
from ninfer.constraints.ir import Auto, Grammar, Node, Ref, Rep, alt, optional, seq
from ninfer.constraints.regex import parse
from ninfer.frontend.tool_contract import VALUE_CLOSE, ToolContract

_CALL, _ANY = "<call>", "<any arguments>"


def call_grammar(contracts: Sequence[ToolContract], begin: PhaseMarker, end: PhaseMarker, *, parallel: bool) -> Grammar:
    """One call or, if ``parallel``, several on consecutive lines."""
    rules: dict[str, Node] = {}
    options = []
    for contract in contracts:
        if contract.strict is None:
            rules[_ANY] = Rep(_parameter(_any_name(), free_text(VALUE_CLOSE)), 0, None)
            arguments: Node = Ref(_ANY)
        else:
            rules |= contract.strict.rules
            arguments = seq(
                *(
                    written if parameter.required else optional(written)
                    for parameter in contract.strict.members
                    for written in (_parameter(parameter.name, Ref(parameter.rule)),)
                )
            )
        options.append(seq(f"{contract.name}>\n", arguments, "</function>\n"))
    rules[_CALL] = seq(begin.node, "\n<function=", alt(options), end.node)
    more = Rep(seq("\n", Ref(_CALL)), 0, None) if parallel else seq()
    rules["<calls>"] = seq(Ref(_CALL), more)
    return Grammar(rules, "<calls>")


def text_then(calls: Grammar | None, begin: PhaseMarker) -> Grammar:
    """Text without the beginning of a call, and then perhaps calls."""
    text = free_text(begin.text)
    if calls is None:
        return Grammar({"<text>": text}, "<text>")
    return Grammar({**calls.rules, "<text>": seq(text, optional(Ref(calls.root)))}, "<text>")


def either(body: Grammar, calls: Grammar) -> Grammar:
    """The body, or calls."""
    return Grammar({**body.rules, **calls.rules, "<turn>": alt([Ref(body.root), Ref(calls.root)])}, "<turn>")


def _parameter(name: Node | str, value: Node) -> Node:
    return seq("<parameter=", name, ">\n", value, f"{VALUE_CLOSE}\n")


@cache
def _any_name() -> Node:
    return Auto(Dfa.from_regex(parse(r"[^>\n]+"), search=False), "raw")
