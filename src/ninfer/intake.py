"""From what a caller asks to what the worker takes: checked, rendered, compiled. On the caller's thread."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING

import attrs

from ninfer.cancellation import CancelScope
from ninfer.contract import PreparedRequest, RequestId, SamplingSpec, effective_output
from ninfer.errors import ContextOverflow, InvalidRequest
from ninfer.inputs import Chat, PromptInput, TextPrompt, TokenPrompt
from ninfer.options import EngineOptions, RequestOptions, SamplingParams
from ninfer.results import GenerationResult, Timings, Usage
from ninfer.runtime.record import RequestRecord
from ninfer.runtime.response import Response

if TYPE_CHECKING:
    from ninfer.frontend import Frontend, PreparedPrompt

INPUTS = (str, Chat, TextPrompt, TokenPrompt)


@attrs.frozen
class Intake:
    """frontend, options: the engine's. max_context: tokens of one sequence."""

    frontend: Frontend
    options: EngineOptions
    max_context: int

    def prepare(self, prompt: PromptInput | PreparedPrompt) -> PreparedPrompt:
        """Raises InvalidRequest naming the field or message, ToolContractError."""
        if isinstance(prompt, INPUTS):
            return self.frontend.prepare(prompt)
        from ninfer.frontend import PreparedPrompt

        if isinstance(prompt, PreparedPrompt):
            return prompt
        raise InvalidRequest(
            f"expected a string, Chat, TextPrompt, TokenPrompt or PreparedPrompt, got {type(prompt).__name__}",
            field="prompt",
        )

    def check(self, prompt: PreparedPrompt) -> None:
        """Raises ContextOverflow and InvalidRequest for a prompt that cannot be answered here."""
        length = len(prompt)
        if length > self.max_context:
            raise ContextOverflow(length, self.max_context)
        if length == 0:
            raise InvalidRequest("has no tokens", field="prompt")
        if prompt.tokens.max() >= self.frontend.vocab_size:
            raise InvalidRequest("was prepared for another model", field="prompt")

    def max_tokens(self, chosen: RequestOptions) -> int:
        """The output budget a request asks for."""
        return self.options.max_tokens if chosen.max_tokens is None else chosen.max_tokens

    def record(
        self, scope: CancelScope, prompt: PreparedPrompt, chosen: RequestOptions, response: Response
    ) -> RequestRecord:
        """A request for one token at least, with its constraint compiled. scope: in which this runs; the request keeps
        its times. Raises InvalidRequest, ConstraintError."""
        wanted = self.max_tokens(chosen)
        output, limit = effective_output(len(prompt), wanted, self.max_context)
        waiting = self.options.queue_timeout
        return RequestRecord(
            request=PreparedRequest(
                id=RequestId(0),  # the worker's mailbox numbers it
                ticket=0,
                identity=prompt.identity,
                digest=prompt.digest,
                requested_output=wanted,
                effective_output=output,
                limit=limit,
                sampling=self._sampling(chosen),
                boundaries=prompt.boundaries,
                markers=prompt.cache_markers,
                rewrite=prompt.rewrite,
                participation=chosen.cache if self.options.cache.enabled else "disabled",
                session=chosen.session,
                update_session=chosen.update_session,
            ),
            session=self.frontend.output_session(prompt, chosen, max_tokens=output),
            response=response,
            submitted=scope.began,
            deadline=scope.deadline,
            queue_deadline=math.inf if waiting is None else scope.began + waiting,
            prepare_seconds=prompt.prepare_seconds,
            metadata=chosen.metadata,
        )

    def empty(self, prompt: PreparedPrompt, chosen: RequestOptions) -> Response:
        """The response to a request for no output, which never reaches the worker."""
        response = Response(lambda: None, lambda: None)
        response.complete(
            GenerationResult(
                logprobs=None if chosen.logprobs is None else (),
                finish_reason="length",
                stop_reason="max_tokens",
                usage=Usage(prompt_tokens=len(prompt)),
                timings=Timings(prepare=prompt.prepare_seconds),
                seed=self._sampling(chosen).seed,
                metadata=chosen.metadata,
            )
        )
        return response

    def _sampling(self, chosen: RequestOptions) -> SamplingSpec:
        fields = attrs.asdict((chosen.sampling or SamplingParams()).over(self.frontend.defaults))
        named = fields["seed"] is not None
        if not named:
            fields["seed"] = secrets.randbits(64)
        logprobs = -1 if chosen.logprobs is None else chosen.logprobs
        return SamplingSpec(**fields, logprobs=logprobs, named=named)
