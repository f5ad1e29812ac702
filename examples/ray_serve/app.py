"""Several engines behind one address: a returning session reaches the replica that holds its context.

    serve run app:build artifact=/models/model.ninfer replicas=2

Clients send a session's name in the header ``x-session-id``; consistent hashing takes it to the same replica for as
long as there is one. Everything else is the HTTP server that ``ninfer serve`` runs, once a replica.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

STICKY = RequestRouterConfig(
    request_router_class="ray.serve.experimental.consistent_hash_router.ConsistentHashRouter",
    request_router_kwargs={"num_fallback_replicas": 1},  # where a session goes while its own replica is full
)


@serve.deployment(request_router_config=STICKY, max_ongoing_requests=64)
@serve.ingress()
class Replica:
    """One engine and its HTTP server. ``/ready`` and ``/metrics`` speak of the replica that answers."""

    def __init__(self, artifact: str, device: str) -> None:
        import ninfer

        self.engine = ninfer.Engine(artifact, device=device, max_outstanding=64, progress=False)

    def __serve_build_asgi_app__(self) -> Any:
        """The replica's application; Serve calls this once the engine is open."""
        from ninfer.gateway.http import create_app

        return named(create_app(self.engine), serve.get_replica_context().replica_id.unique_id)

    def check_health(self) -> None:
        """Serve replaces a replica for which this raises."""
        if not self.engine.available:
            raise RuntimeError("the engine takes no requests")

    def __del__(self) -> None:
        if hasattr(self, "engine"):
            self.engine.close()


def named(app: Any, name: str) -> Any:
    """``app``, with the replica's name in the header ``x-replica`` of every response."""

    async def call(scope: Any, receive: Any, send: Any) -> None:
        async def send_named(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-replica", name.encode())]}
            await send(message)

        await app(scope, receive, send_named)

    return call


def build(arguments: Mapping[str, str]) -> Application:
    """The application of ``serve run``. artifact: path on every machine. replicas: engines, default 2. gpus: of each
    engine, default 0: the CPU; 1 gives each engine a GPU of its own."""
    gpus = int(arguments.get("gpus", "0"))
    replica = Replica.options(
        num_replicas=int(arguments.get("replicas", "2")),
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    )
    return replica.bind(arguments["artifact"], "cuda:0" if gpus else "cpu")
