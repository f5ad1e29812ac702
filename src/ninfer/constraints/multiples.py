"""Grammars of the int64 multiples of an integer inside bounds."""

from __future__ import annotations

from ninfer.constraints.automata import Dfa
from ninfer.constraints.ir import Auto, Lit, Node, alt, seq
from ninfer.constraints.limits import Work, check_states
from ninfer.constraints.nfa import DEAD
from ninfer.constraints.numbers import Bounds, naturals


def multiples(bounds: Bounds, divisor: int, work: Work) -> Node:
    """The canonical int64 texts of the multiples of ``divisor`` (above 0) inside the bounds."""
    low, high = bounds.integers()
    options: list[Node] = []
    if low <= -divisor:
        options.append(seq("-", _positive(max(1, -high), -low, divisor, work)))
    if low <= 0 <= high:
        options.append(Lit("0"))
    options.append(_positive(max(1, low), high, divisor, work))
    return alt(options)


def _positive(low: int, high: int, divisor: int, work: Work) -> Node:
    """Multiples of ``divisor`` from ``low``, above 0, to ``high``. Factors of ten are trailing zeros."""
    zeros = 0
    while divisor % 10 == 0:
        divisor //= 10
        zeros += 1
    low, high = -(-low // 10**zeros), high // 10**zeros
    if high // divisor < -(-low // divisor):
        return alt(())
    digits = naturals(low, high) if divisor == 1 else Auto(_divisible(low, high, divisor, work), "raw")
    return seq(digits, "0" * zeros)


def _divisible(low: int, high: int, divisor: int, work: Work) -> Dfa:
    """Digits read from the left: how many, how they compare with the first digits of each bound, and the remainder."""
    least, most = str(low), str(high)
    start = (0, 0, 0, 0)
    number, order = {start: 0}, [start]
    trans: list[list[int]] = []
    accept = bytearray()
    for count, to_low, to_high, remainder in order:
        check_states(len(order))
        work.spend(30)
        row = [DEAD] * 12
        if count < len(most):
            for digit in range(count == 0, 10):
                above = 1 if count >= len(least) else to_low or _compare(digit, int(least[count]))
                below = to_high or _compare(digit, int(most[count]))
                if count + 1 == len(most) and below > 0:
                    break
                state = (count + 1, above, below, (remainder * 10 + digit) % divisor)
                if state not in number:
                    number[state] = len(order)
                    order.append(state)
                row[1 + digit] = number[state]
        trans.append(row)
        long_enough = count > len(least) or (count == len(least) and to_low >= 0)
        accept.append(remainder == 0 and long_enough)
    return Dfa([0, *range(0x30, 0x3B)], trans, accept).trimmed().minimise(work)


def _compare(a: int, b: int) -> int:
    return (a > b) - (a < b)
