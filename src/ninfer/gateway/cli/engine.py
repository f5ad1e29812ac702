"""The options of commands that open an engine, and what they choose."""

from __future__ import annotations

import argparse
from typing import Any

from ninfer.options import CacheOptions, EngineOptions, SpecOptions

_KEPT = {
    "device_state_slots": ("N", "recurrent states kept on the device"),
    "host_state_slots": ("N", "recurrent states kept in host memory"),
    "host_kv_bytes": ("BYTES", "host memory for keys and values of finished requests"),
    "retained_kv_tokens": ("N", "tokens of the device's KV for finished requests"),
    "max_continuations": ("N", "finished requests that are kept"),
    "max_shared_prefixes": ("N", "prefixes kept for any request"),
}
"""Fields of CacheOptions."""


def add_engine_options(g: Any) -> None:
    """Declare the options that :func:`engine_options` reads on a parser or a group of one."""
    g.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda:N; default: auto")
    g.add_argument("--kv-dtype", default="auto", metavar="TYPE", help="numbers of the KV cache; default: auto")
    g.add_argument(
        "--kv-capacity", type=int, metavar="N", help="tokens of the KV cache; default: what there is room for"
    )
    g.add_argument("--no-cache", action="store_true", help="keep nothing of finished requests")
    for name, (metavar, what) in _KEPT.items():
        g.add_argument(f"--{name.replace('_', '-')}", type=int, metavar=metavar, help=what)
    g.add_argument("--spec", default="none", metavar="BACKEND", help="what drafts: none, mtp, dflash or dflash2")
    g.add_argument("--draft-tokens", type=int, metavar="N", help="tokens drafted for a round; default: mtp 3, else 7")
    g.add_argument("--spec-adaptive", action="store_true", help="as many drafts as pay, round by round")
    g.add_argument(
        "--proposal-head", choices=("on", "off"), help="draft with the reduced output head; default: where there is one"
    )


def engine_options(arguments: argparse.Namespace, **others: Any) -> EngineOptions:
    """The options a command line chose, and ``others``. Raises InvalidRequest naming the field."""
    return EngineOptions(
        device=arguments.device,
        kv_dtype=arguments.kv_dtype,
        kv_capacity="auto" if arguments.kv_capacity is None else arguments.kv_capacity,
        cache=CacheOptions(enabled=not arguments.no_cache, **{name: getattr(arguments, name) for name in _KEPT}),
        spec=SpecOptions(
            arguments.spec,
            draft_tokens=arguments.draft_tokens,
            adaptive=arguments.spec_adaptive,
            proposal_head={None: None, "on": True, "off": False}[arguments.proposal_head],
        ),
        **others,
    )
