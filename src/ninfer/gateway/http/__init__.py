"""The HTTP server: OpenAI's Chat Completions and Responses and Anthropic's Messages over one engine.

A request is read against its protocol's table of fields (``shapes``), translated into a Chat and RequestOptions
(``chat_completions``, ``responses``, ``messages``), and submitted on a thread; its events are written in the protocol's
words (``exchange``). What a table does not name is refused. Needs the extra ``serve``.
"""

from __future__ import annotations

from ninfer.gateway.http.app import create_app
from ninfer.gateway.http.options import ServerOptions

__all__ = ["ServerOptions", "create_app"]
