"""Occupancy of the stores: walked object by object for tests, read from counters for everybody else."""

from __future__ import annotations

from ninfer.errors import InvariantError
from ninfer.program.licensing import checkpoint_tokens
from ninfer.program.store import Store


def audit(store: Store, settled: bool) -> dict[str, int]:
    """Recomputed by walking every object. Raises InvariantError where two of them contradict each other.

    settled: no transition is open, so rows and histories explain every reference.
    """
    states = store.states.audit()
    facts = {
        "lanes": len(store.sequences),
        "state_slots": states.used,
        "host_states": states.host_used,
        "continuations": sum(owner.kind == "continuation" for owner, _ in store.histories.live()),
        "shared": sum(owner.kind == "shared" for owner, _ in store.histories.live()),
    }
    for kind, kv in store.kv.items():
        pool, name = kv.audit(), kind.name.lower()
        facts[f"rows.{name}"] = pool.rows
        facts[f"pages.{name}.allocated"] = pool.allocated
        facts[f"pages.{name}.reserved"] = pool.reserved
        facts[f"pages.{name}.available"] = pool.available
        facts[f"pages.{name}.host"] = pool.host
    _audit_references(store, settled)
    return facts


def _audit_references(store: Store, settled: bool) -> None:
    """Every image is referenced exactly as often as it counts, at the frontier its checkpoints claim, and every
    checkpoint is complete."""
    refs: dict[object, int] = {}
    pins: dict[object, int] = {}
    for _, record in store.sequences.live():
        refs[record.binding.write] = refs.get(record.binding.write, 0) + 1
        if record.binding.forked:
            refs[record.binding.read] = refs.get(record.binding.read, 0) + 1
            pins[record.binding.read] = pins.get(record.binding.read, 0) + 1
        for c in record.checkpoints.values():
            refs[c.image] = refs.get(c.image, 0) + 1
            _require(c.frontier <= record.frontier, "a row's checkpoints lie behind it")
    for _, history in store.histories.live():
        _require(bool(history.checkpoints), "a history has a checkpoint")
        for c in history.checkpoints.values():
            refs[c.image] = refs.get(c.image, 0) + 1
            image = store.states.images.get(c.image)
            _require(not image.mutable and image.frontier == c.frontier, "a checkpoint's state is the one it names")
        for kind, kv in store.kv.items():
            space = kv.spaces.get(history.spaces[kind])
            beyond = space.committed - checkpoint_tokens(kind, history.frontier)
            _require(
                not space.active and (beyond == 0 or (beyond > 0 and not settled)),
                "a history's pages reach its frontier",
            )
    for handle, image in store.states.images.live():
        explained = (refs.get(handle, 0), pins.get(handle, 0))
        counted = (image.refs, image.pins)
        _require(counted == explained if settled else counted >= explained, "an image counts its references")


def occupancy(store: Store) -> dict[str, int]:
    """Used and available places, and bytes that copies have moved."""
    states = store.states
    facts = {
        "state_slots.total": states.capacity,
        "state_slots.used": states.capacity - states.available,
        "host_states.total": states.host_capacity,
        "host_states.used": states.host_capacity - states.host_available,
        "host_bytes.allocated": store.transfers.host_bytes(),
        "host_bytes.used": store.arena.used_bytes(),
    }
    for kind, kv in store.kv.items():
        name = kind.name.lower()
        facts[f"pages.{name}.total"] = kv.pool.capacity
        facts[f"pages.{name}.used"] = kv.pool.allocated
        facts[f"pages.{name}.reserved"] = kv.pool.reserved
    return facts | {f"copied.{way}_bytes": n for way, n in store.transfers.bytes.items()}


def digest(store: Store) -> int:
    """A hash of the revision and every counter."""
    counters = [store.revision, store.states.available, store.states.host_available, len(store.sequences)]
    for kv in store.kv.values():
        counters += [kv.pool.allocated, kv.pool.reserved, len(kv.spaces), len(kv.pages), store.arena.used(kv.kind)]
    counters += [sum(1 for _ in store.histories.live()), len(store.states.images)]
    return hash(tuple(counters))


def _require(holds: bool, rule: str) -> None:
    if not holds:
        raise InvariantError(f"context store: broken rule: {rule}")
