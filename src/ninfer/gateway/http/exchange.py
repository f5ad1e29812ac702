"""One request from its first byte to its last: read, prepared and submitted off the event loop, answered, settled.

A client that leaves ends what is done for it. Until its request is in the engine, the exchange ends there and then; a
request in the engine is cancelled, and the exchange runs on to its end, which comes within one round. Either way
everything is released, counted and written down on the one path there is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import attrs

from ninfer.gateway.http.access import check_key
from ninfer.gateway.http.body import Receive, parse, read_body
from ninfer.gateway.http.errors import ApiError, ClientLeft, api_error
from ninfer.gateway.http.leaving import unless_left, watched
from ninfer.gateway.http.log import Entry
from ninfer.gateway.http.service import Service
from ninfer.gateway.http.sse import dumps
from ninfer.gateway.http.translate import Call, Paths, Served, without_close
from ninfer.handle import GenerationHandle
from ninfer.inputs import Chat
from ninfer.results import Delta, Event, GenerationResult, TokenLogprob

logger = logging.getLogger("ninfer.http")
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


@attrs.frozen
class Protocol:
    """One way to ask. read: a body as a Call, or as a Chat whose tokens are to be counted. error: how it writes an
    error. status: the status it answers with."""

    name: str
    read: Callable[[Mapping[str, Any], Served, Paths], Call | Chat]
    error: Callable[[ApiError], dict[str, Any]]
    status: Callable[[ApiError], int] = lambda error: error.status


@attrs.frozen
class Endpoint:
    """An ASGI application that answers one protocol's requests."""

    service: Service
    protocol: Protocol

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        entry = Entry(id=f"req_{secrets.token_hex(12)}", protocol=self.protocol.name)
        client = _Client(send, self.service.options.stall_timeout, entry)
        try:
            check_key(scope, self.service.options.api_keys)
            with self.service.place():
                await _answer(self.service, self.protocol, scope, receive, client)
        except ClientLeft:
            entry.outcome = "cancelled"
        except asyncio.CancelledError:
            entry.outcome = "cancelled"
            raise
        except Exception as error:
            await _fail(self.protocol, client, api_error(error, client.paths), error)
        finally:
            client.leave()
            if client.handle is not None:
                client.handle.close()
            self.service.settle(entry)


class _Client:
    """The other end of a connection, and its request in the engine once there is one."""

    def __init__(self, send: Send, stall_timeout: float, entry: Entry) -> None:
        self._send, self._stall_timeout = send, stall_timeout
        self.entry = entry
        self.left = False
        self.paths: Paths = {}
        self.call: Call | None = None
        self.handle: GenerationHandle | None = None

    def leave(self) -> None:
        """Nobody reads on. May come at any time."""
        self.left = True
        if self.handle is not None:
            self.handle.cancel()

    async def write(self, message: Mapping[str, Any]) -> None:
        """Send, unless there is nobody to send to. A client that takes nothing for too long counts as gone."""
        if self.left:
            return
        try:
            async with asyncio.timeout(self._stall_timeout):
                await self._send(message)
        except (TimeoutError, OSError):
            self.leave()

    async def begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.entry.status = status
        name = self.entry.id.encode()
        headers = [*headers, (b"x-request-id", name), (b"request-id", name)]
        await self.write({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, data: bytes, more: bool = False) -> None:
        await self.write({"type": "http.response.body", "body": data, "more_body": more})

    async def json(self, status: int, value: Any, *headers: tuple[bytes, bytes]) -> None:
        data = dumps(value).encode("utf-8", "replace")
        kind, length = (b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())
        await self.begin(status, [kind, length, *headers])
        await self.body(data)


async def _answer(
    service: Service, protocol: Protocol, scope: Mapping[str, Any], receive: Receive, client: _Client
) -> None:
    raw = await read_body(scope, receive, service.options)
    counted = await unless_left(receive, _start(service, protocol, raw, client))
    if counted is not None:
        await client.json(200, {"input_tokens": counted})
        client.entry.outcome = "stop"
        return
    assert client.call is not None
    client.entry.stream = client.call.stream
    async with watched(receive, client.leave):
        await (_stream if client.call.stream else _aggregate)(client.call, client, service.served)


async def _start(service: Service, protocol: Protocol, raw: bytes, client: _Client) -> int | None:
    """Read, prepare, compile and submit. The number of tokens where only that was asked."""
    engine = service.engine
    asked = await service.run(lambda: protocol.read(parse(raw), service.served, client.paths))
    if isinstance(asked, Chat):
        return len(await engine.prepare_async(asked))
    client.call = asked
    client.handle = await engine.submit_async(asked.prompt, asked.options, timeout=service.options.request_timeout)
    return None


async def _events(client: _Client, served: Served) -> AsyncIterator[Event]:
    """The request's events, noted as they pass. Raises the request's error instead of a last event that has one."""
    assert client.handle is not None
    entry, thinking = client.entry, False
    async for event in client.handle:
        if isinstance(event, Delta):
            if thinking and event.channel == "content" and event.logprobs:
                event = without_close(event, served)
            thinking = event.channel == "thinking"
            if entry.first_event is None:
                entry.first_event = time.monotonic()
        elif isinstance(event, GenerationResult):
            entry.result = event
            if event.error is not None:
                raise event.error
            entry.outcome = event.finish_reason
        yield event


async def _stream(call: Call, client: _Client, served: Served) -> None:
    """The answer as it comes. The status waits for the first event, so that a request refused in the queue says so."""
    started = False
    async for event in _events(client, served):
        if not started:
            kind, cache = (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")
            await client.begin(200, [kind, cache])
            started = True
        await client.body(call.encoder.frames(event), more=not isinstance(event, GenerationResult))


async def _aggregate(call: Call, client: _Client, served: Served) -> None:
    logprobs: list[TokenLogprob] = []
    async for event in _events(client, served):
        if isinstance(event, Delta) and event.channel == "content":
            logprobs.extend(event.logprobs)
        elif isinstance(event, GenerationResult):
            await client.json(200, call.encoder.whole(event, logprobs))


async def _fail(protocol: Protocol, client: _Client, error: ApiError, cause: Exception) -> None:
    """Say what went wrong: in the stream, if there is one already."""
    entry = client.entry
    entry.outcome = _outcome(error)
    entry.error = type(cause).__name__ if not isinstance(cause, ApiError) else error.code
    if error.status >= 500 and error.code == "internal_error":
        logger.error("request %s failed", entry.id, exc_info=cause)
    if entry.status:
        frames = client.call.encoder.failure(error) if client.call is not None and entry.stream else b""
        await client.body(frames)
        return
    status = protocol.status(error)
    retry = [(b"retry-after", b"1")] if error.status in (429, 503) else []
    challenge = [(b"www-authenticate", b"Bearer")] if error.status == 401 else []
    await client.json(status, protocol.error(error), *retry, *challenge)


def _outcome(error: ApiError) -> str:
    known = {"overloaded": "overloaded", "queue_timeout": "timeout", "timeout": "timeout"}
    return known.get(error.code, "refused" if error.status < 500 else "failed")
