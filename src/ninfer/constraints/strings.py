"""Strings: length bounds alone are counted; patterns and exclusions become one automaton over decoded characters."""

from __future__ import annotations

from contextlib import nullcontext

from ninfer.constraints.automata import Dfa
from ninfer.constraints.branches import Text, Textual
from ninfer.constraints.formats import FORMATS
from ninfer.constraints.ir import Auto, Counted, Node
from ninfer.constraints.limits import MAX_STRING_LENGTH, Work, placed
from ninfer.constraints.regex import parse
from ninfer.errors import ConstraintLimit


class Automata:
    """The automata of one compilation, each built once."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self._texts: dict[Text, Dfa] = {}
        self._products: dict[tuple[Textual, str], Dfa] = {}

    def text(self, text: Text) -> Dfa:
        """The strings with a property."""
        found = self._texts.get(text)
        if found is None:
            if text.holds:
                pattern = FORMATS[text.value] if text.keyword == "format" else text.value
                with placed(text.place.pointer):
                    found = Dfa.from_regex(parse(pattern), search=True, work=self.work).minimise(self.work)
            else:
                found = self.text(~text).complement()
            self._texts[text] = found
        return found

    def matches(self, text: Text, value: str) -> bool:
        """Whether one string has a property."""
        self.work.spend(len(value))
        return self.text(text).accepts(value)

    def empty(self, branch: Textual) -> bool:
        """Whether no string belongs to the branch."""
        return branch.empty or (_needs_automaton(branch) and self.product(branch).empty)

    def inside(self, branch: Textual) -> Node:
        """The branch's strings as a JSON string spells them, without the quotes."""
        if _needs_automaton(branch):
            return Auto(self.product(branch), "json")
        return Counted(branch.low, branch.high)

    def product(self, branch: Textual, without: str = "") -> Dfa:
        """The strings of a branch that do not contain ``without`` (when it is not empty)."""
        found = self._products.get((branch, without))
        if found is None:
            with placed(branch.texts[0].place.pointer) if branch.texts else nullcontext():
                found = self._products[branch, without] = self._product(branch, without)
        return found

    def _product(self, branch: Textual, without: str) -> Dfa:
        parts = [self.text(text) for text in branch.texts]
        if without:
            parts.append(Dfa.without(without))
        if branch.banned:
            parts.append(Dfa.words(branch.banned, self.work).complement())
        if len(parts) > 1:
            parts = [parts[0].product(*parts[1:], work=self.work).minimise(self.work)]
        if branch.low or branch.high is not None or not parts:
            if max(branch.low, branch.high or 0) > MAX_STRING_LENGTH:
                raise ConstraintLimit(
                    f"a length bound above {MAX_STRING_LENGTH} beside a pattern or an exclusion", limit="length"
                )
            parts.append(Dfa.length(branch.low, branch.high))
        return parts[0].product(*parts[1:], work=self.work)


def _needs_automaton(branch: Textual) -> bool:
    return bool(branch.texts or branch.banned)
