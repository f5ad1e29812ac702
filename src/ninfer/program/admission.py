"""Whether a request fits: alone on an empty device, and after others have ended."""

from __future__ import annotations

from collections.abc import Collection

from ninfer.context import Infeasible, Shortage
from ninfer.contract import PreparedRequest, SequenceHandle
from ninfer.program.licensing import reserved_tokens
from ninfer.program.store import Store


def isolated_root_fits(store: Store, request: PreparedRequest) -> Infeasible | None:
    prompt, output = len(request.identity.tokens), request.effective_output
    profile, missing = store.profile, []
    if prompt < 1:
        missing.append(Shortage("prompt", 1))
    if output < 1:
        missing.append(Shortage("output", 1))
    if reserved_tokens(prompt, output) > profile.max_context:
        missing.append(Shortage("context", reserved_tokens(prompt, output) - profile.max_context))
    for kind, units in profile.entitlement(prompt, output).items():
        if units > profile.pages[kind]:
            missing.append(Shortage(f"pages.{kind.name.lower()}", units - profile.pages[kind]))
    return Infeasible(tuple(missing)) if missing else None


def prove_backfill(
    store: Store, head: PreparedRequest, donors: Collection[SequenceHandle], extra: PreparedRequest | None
) -> bool:
    """No argument about time: every row but the donors keeps its whole reservation, as would ``extra``; every inactive
    history is gone; and the head starts from nothing."""
    stay = [record for handle, record in store.sequences.live() if handle not in donors]
    starts = [head] if extra is None else [head, extra]
    if len(stay) + len(starts) > store.rows:
        return False
    entitlements = [store.profile.entitlement(len(r.identity.tokens), r.effective_output) for r in starts]
    for kind, kv in store.kv.items():
        spaces = [kv.spaces.get(record.spaces[kind]) for record in stay]
        held = len({block for space in spaces for block in space.blocks})
        held += sum(space.entitlement - len(space.blocks) for space in spaces)
        if held + sum(entitlement[kind] for entitlement in entitlements) > kv.pool.capacity:
            return False
    images = {image for record in stay for image in (record.binding.read, record.binding.write)}
    images |= {c.image for record in stay for c in record.checkpoints.values()}
    held = sum(store.states.images.get(image).device is not None for image in images)
    return held + len(starts) <= store.states.capacity
