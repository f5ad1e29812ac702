"""What a request's options ask of its answer, as a language and the contracts that read it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from ninfer.constraints import OutputConstraint, language
from ninfer.constraints.compose import PhaseMarker, after_thinking
from ninfer.constraints.ir import Grammar
from ninfer.constraints.service import LanguagePlan
from ninfer.errors import ConstraintCombination, InvalidRequest, ToolContractError
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.frontend.tool_contract import ToolContract
from ninfer.frontend.tool_grammar import call_grammar, either, text_then
from ninfer.options import RequestOptions, ToolChoice


@attrs.frozen
class Markers:
    """How a vocabulary writes the envelope of an answer."""

    think_close: PhaseMarker
    call_open: PhaseMarker
    call_close: PhaseMarker


@attrs.frozen
class AnswerPlan:
    """language: of the whole answer; None where it is free. contracts: of the tools whose calls are looked for.
    either: the content is calls or a body, never both."""

    language: LanguagePlan | None
    contracts: tuple[ToolContract, ...]
    either: bool = False


def plan_answer(
    prompt: PreparedPrompt, options: RequestOptions, markers: Markers, is_text_token: Callable[[int], bool]
) -> AnswerPlan:
    """Everything that can be refused without compiling is. Raises ConstraintError, ToolContractError."""
    body, choice = options.constraint, options.tool_choice
    if body is not None and not isinstance(body, OutputConstraint):
        raise InvalidRequest(f"expected an OutputConstraint, got {body!r}", field="constraint")
    contracts = _contracts(prompt, choice)
    if body is not None and contracts and not body.kind.startswith("json"):
        raise ConstraintCombination("only a JSON constraint can be combined with tools")
    bound = body is not None or (bool(prompt.tools) and _asks(choice, contracts))
    if not bound:
        return AnswerPlan(None, contracts)
    _check_endings(options, free_text=body is None and choice == _BASIC and not any(c.strict for c in contracts))
    thinking = prompt.start_channel == "thinking"
    calls_only = bool(contracts) and choice.mode == "required"
    if body is not None and calls_only:
        body.check()

    def build() -> Grammar:
        calls = None
        if contracts:
            calls = call_grammar(contracts, markers.call_open, markers.call_close, parallel=choice.parallel)
        if calls is not None and calls_only:
            turn = calls
        elif body is None:
            turn = text_then(calls, markers.call_open)
        else:
            turn = language(body, is_text_token)
            if calls is not None:
                turn = either(turn, calls)
        return after_thinking(turn, markers.think_close) if thinking else turn

    used = None if calls_only else body
    policy = (calls_only, choice.parallel, tuple(map(_identity, contracts)))
    kind = "tools" if used is None else used.kind
    return AnswerPlan(
        LanguagePlan(kind, (used, thinking, policy), build), contracts, either=bool(contracts) and used is not None
    )


_BASIC = ToolChoice()


def _contracts(prompt: PreparedPrompt, choice: ToolChoice) -> tuple[ToolContract, ...]:
    """The tools that may be called."""
    names = [tool.name for tool in prompt.tools]
    if choice.mode == "required" and not names:
        raise ToolContractError("a call is required and no tool is declared", field="tool_choice")
    if choice.allowed_names is not None:
        unknown = [name for name in choice.allowed_names if name not in names]
        if unknown or not choice.allowed_names:
            what = f"{unknown[0]!r} is not declared" if unknown else "no tool is allowed"
            raise ToolContractError(what, field="tool_choice.allowed_names")
    if choice.mode == "none":
        return ()
    allowed = names if choice.allowed_names is None else choice.allowed_names
    return tuple(ToolContract.of(tool, i) for i, tool in enumerate(prompt.tools) if tool.name in allowed)


def _asks(choice: ToolChoice, contracts: tuple[ToolContract, ...]) -> bool:
    """Whether a prompt with tools is constrained."""
    if choice.constraints == "basic":
        return True
    return attrs.evolve(choice, constraints="basic") != _BASIC or any(contract.strict for contract in contracts)


def _identity(contract: ToolContract) -> Any:
    """What the grammar depends on: the name, and the parameters where they are enforced."""
    return contract.name, contract.strict


def _check_endings(options: RequestOptions, *, free_text: bool) -> None:
    """A constrained answer ends where its language and the model say so; free text also at the caller's own ends."""
    for field in ("ignore_eos",) if free_text else ("stop", "stop_token_ids", "ignore_eos"):
        if getattr(options, field):
            raise ConstraintCombination("a constrained answer ends at the model's own stop ids only", field=field)
