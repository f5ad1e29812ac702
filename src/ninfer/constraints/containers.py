"""The rules of one object or array: what may follow after what has been written."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from ninfer.constraints.branches import Claims, Finite, Listed, place
from ninfer.constraints.ir import Node, Ref, Rep, alt, json_spelled, seq
from ninfer.constraints.limits import MAX_GRAMMAR_REPEAT, MAX_OBJECT_STATES, MAX_UNIQUE_STATES
from ninfer.constraints.literals import key, spell
from ninfer.constraints.objects import Fields
from ninfer.errors import ConstraintLimit, UnsupportedSchema

if TYPE_CHECKING:
    from ninfer.constraints.json_lang import Writer


def members(writer: Writer, branch: Fields, claims: Claims) -> Node:
    """An object. A rule knows the next declared member, and how many were written as far as that matters."""
    writer.work.spend(150)
    productive = writer.graph.productive
    fields = [f for f in branch.fields if f.claims in productive]
    others = [o for o in branch.others if o.claims in productive]
    for field in fields:
        if field.undeclared is not None:
            raise UnsupportedSchema("a required name must be declared in 'properties'",
                                    pointer=field.undeclared.pointer, keyword="required")  # fmt: skip
    needed = [*accumulate((int(f.required) for f in reversed(fields)), initial=0)][::-1]
    low, high = branch.low, branch.high
    if others and low - needed[0] > 1:
        # Further members may repeat a name, so they count as one at least and no more is known.
        raise UnsupportedSchema(
            "'minProperties' is only supported where at most one undeclared member is needed to reach it",
            pointer=place(claims, "minProperties"), keyword="minProperties",
        )  # fmt: skip
    if high is not None and not others and high >= len(fields):
        high = None
    cap = max(1, low, high or 0)
    if cap > 1 and cap * (len(fields) + 1) > MAX_OBJECT_STATES:
        keyword = "minProperties" if high is None else "maxProperties"
        raise ConstraintLimit(f"counting the members needs more than {MAX_OBJECT_STATES} states", limit="members",
                              pointer=place(claims, keyword))  # fmt: skip
    name = writer.fresh()

    def possible(index: int, count: int) -> bool:
        most = high is None or count + needed[index] <= high
        return most and (bool(others) or count + len(fields) - index >= low)

    def rule(index: int, count: int) -> Ref:
        return Ref(f"{name}_{index}_{count}")

    reached: list[set[int]] = [{0}, *(set() for _ in fields)]
    for index, field in enumerate(fields):
        for count in sorted(reached[index]):
            writer.work.spend(40)
            options: list[Node] = []
            after = min(count + 1, cap)
            if count != high and possible(index + 1, after):
                comma = writer.comma if count else ""
                literal = f'{comma}"{json_spelled(field.name)}"{writer.colon}'
                options.append(seq(literal, writer.value(field.claims), rule(index + 1, after)))
                reached[index + 1].add(after)
            if not field.required and possible(index + 1, count):
                options.append(rule(index + 1, count))
                reached[index + 1].add(count)
            writer.rules[rule(index, count).rule] = alt(options)
    last = len(fields)
    pending = sorted(reached[last])
    for count in pending:
        writer.work.spend(40)
        options = [seq("}")] if count >= low else []
        after = min(count + 1, cap)
        if others and count != high:
            comma = writer.comma if count else ""
            for other in others:
                pair = (writer.string(other.names), writer.colon, writer.value(other.claims))
                options.append(seq(comma, *pair, rule(last, after)))
            if after not in reached[last]:
                reached[last].add(after)
                pending.append(after)
        writer.rules[rule(last, count).rule] = alt(options)
    return seq("{", rule(0, 0))


def array(writer: Writer, branch: Listed, claims: Claims) -> Node:
    """An array: a rule for each position of the prefix, then a counted or endless tail."""
    writer.work.spend(100 + 20 * len(branch.prefix))
    productive = writer.graph.productive
    low, high = branch.low, branch.high
    for index, item in enumerate((*branch.prefix, branch.tail)):
        if item not in productive:
            high = index if high is None else min(index, high)
            break
    if branch.unique and (high is None or high > 1):
        return _unique(writer, branch, high, claims)
    for bound in (low, high or 0):
        if bound > MAX_GRAMMAR_REPEAT:
            raise ConstraintLimit(
                f"an array of more than {MAX_GRAMMAR_REPEAT} items", limit="items", pointer=place(claims)
            )
    positions = len(branch.prefix) if high is None else min(len(branch.prefix), high)
    name = writer.fresh()
    for index in range(positions):
        comma = writer.comma if index else ""
        more = seq(comma, writer.value(branch.prefix[index]), Ref(f"{name}_{index + 1}"))
        writer.rules[f"{name}_{index}"] = alt([seq("]"), more] if index >= low else [more])
    writer.rules[f"{name}_{positions}"] = _tail(writer, branch.tail, positions, low, high, name)
    return seq("[", Ref(f"{name}_0"))


def _tail(writer: Writer, tail: Claims, written: int, low: int, high: int | None, name: str) -> Node:
    """The rest of an array of which so many items are written, with the bracket."""
    if written == high:
        return seq("]")
    item = writer.value(tail)
    more = seq(writer.comma, item)
    first, done = (more, written + 1) if written else (item, 1)
    if high is None:
        endless = f"{name}_tail"
        writer.rules[endless] = alt([seq("]"), seq(more, Ref(endless))])
        rest = seq(Rep(more, low - done, low - done) if low > done else "", Ref(endless))
    else:
        rest = seq(Rep(more, max(0, low - done), high - done) if high > done else "", "]")
    items = seq(first, rest)
    return items if low > written else alt([seq("]"), items])


def _unique(writer: Writer, branch: Listed, high: int | None, claims: Claims) -> Node:
    """An array of distinct items out of finitely many: a rule knows the position and what was used."""

    def choices(index: int) -> dict[str, str]:
        options: dict[str, str] = {}
        for found in writer.graph.live(branch.item(index)):
            if not isinstance(found, Finite):
                raise UnsupportedSchema("'uniqueItems' is only supported for items with finitely many values",
                                        pointer=place(claims, "uniqueItems"), keyword="uniqueItems")  # fmt: skip
            options |= {key(value): spell(value, writer.spelling) for value in found.values}
        return options

    at_position = [choices(index) for index in range(len(branch.prefix) + 1) if high is None or index < high]
    name = writer.fresh()
    start: frozenset[str] = frozenset()
    number = {start: 0}
    order = [start]
    for used in order:
        count = len(used)
        options: list[Node] = [seq("]")] if count >= branch.low else []
        if high is None or count < high:
            for value, text in at_position[min(count, len(branch.prefix))].items():
                writer.work.spend(40)
                if value not in used:
                    after = used | {value}
                    if after not in number:
                        number[after] = len(order)
                        order.append(after)
                    if len(order) > MAX_UNIQUE_STATES:
                        raise ConstraintLimit(f"'uniqueItems' needs more than {MAX_UNIQUE_STATES} states",
                                              limit="unique", pointer=place(claims, "uniqueItems"))  # fmt: skip
                    options.append(seq(writer.comma if count else "", text, Ref(f"{name}_{number[after]}")))
        writer.rules[f"{name}_{number[used]}"] = alt(options)
    return seq("[", Ref(f"{name}_0"))
