"""What a request's options ask of its answer, as a language plan; refusals of what contradicts itself."""

from __future__ import annotations

from collections.abc import Callable

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.compose import PhaseMarker, after_thinking
from ninfer.constraints.ir import Grammar
from ninfer.constraints.service import LanguagePlan
from ninfer.errors import ConstraintCombination, InvalidRequest
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.options import RequestOptions


def plan_language(
    prompt: PreparedPrompt, options: RequestOptions, close: PhaseMarker, is_text_token: Callable[[int], bool]
) -> LanguagePlan | None:
    """The language of the whole answer; None where it is free. Compiles nothing. Raises ConstraintError."""
    constraint = options.constraint
    if constraint is None:
        return None
    if not isinstance(constraint, OutputConstraint):
        raise InvalidRequest(f"expected an OutputConstraint, got {constraint!r}", field="constraint")
    _check_endings(options)
    if prompt.tools:
        raise ConstraintCombination("a constraint cannot be combined with tools")
    thinking = prompt.start_channel == "thinking"

    def build() -> Grammar:
        turn = language(constraint, is_text_token)
        return after_thinking(turn, close) if thinking else turn

    return LanguagePlan(constraint.kind, (constraint, thinking), build)


def _check_endings(options: RequestOptions) -> None:
    """A constrained answer ends where its language and the model say so, nowhere else."""
    for field in ("stop", "stop_token_ids", "ignore_eos"):
        if getattr(options, field):
            raise ConstraintCombination("a constrained answer ends at the model's own stop ids only", field=field)
