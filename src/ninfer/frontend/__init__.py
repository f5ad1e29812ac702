"""Meaning of prompts and answers.

A prompt goes down this list, an answer comes up it:

    resources, vocabulary, tokenizer    the model's files, its token domain, text to ids
    generation, protocol                stop ids and sampling defaults; the markers of the chat protocol
    plain, messages, tools              what callers hand in, checked
    budget, sandbox, template, render   the chat template, run safely; the text and the places in it
    frontiers, prompt                   tokens with their content identity
    envelope, decoder, rounds, session  an answer's tokens become channels, text and tool calls

``Frontend`` is the only way in. It never looks at queues, caches or devices.
"""

from ninfer.frontend.frontend import Frontend
from ninfer.frontend.prompt import PreparedPrompt
from ninfer.frontend.resources import FrontendResources
from ninfer.frontend.rounds import Preview
from ninfer.frontend.session import OutputSession

__all__ = ["Frontend", "FrontendResources", "OutputSession", "PreparedPrompt", "Preview"]
