"""Which parameters share a stored object, and in what row order.

Parameters read at the same input are stacked, so that one object serves one read. A group never crosses components:
the bytes of an unselected component are never inside an object that a selected one needs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence

from ninfer.models.qwen3_5.parameters import ParameterSpec

_FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    "text attention": (("query", "key", "gate", "value"), ("query", "key"), ("gate", "value")),
    "dflash attention": (("query", "key", "value"),),
    "dflash2 attention": (("query", "key", "value"),),
    "vision attention": (("query", "key", "value"), ("query_bias", "key_bias", "value_bias")),
    "gdn": (("query", "key", "value", "z"), ("query", "key"), ("value", "z"), ("a_projection", "b_projection")),
    "mlp": (("gate", "up"),),
    "moe": (("router", "shared_score"),),
    "shared": (("gate", "up"),),
    "experts": (),
}


def parents(specs: Sequence[ParameterSpec], key: Mapping[str, Hashable]) -> list[tuple[str, ...]]:
    """Stored objects as tuples of parameter names, in storage order: fused groups first, then single parameters.

    specs: components in the order text, mtp, vision, dflash, dflash2, proposal. key: what must agree inside a group
    (format, encoder, divisor) by parameter name; a name without a key has no object of its own: it is bound to
    another's.
    """
    groups: list[tuple[str, ...]] = []
    used: set[str] = set()
    for members in _candidates([spec.name for spec in specs]):
        keys = {key[name] for name in members if name in key}
        if len(keys) == 1 and all(name in key and name not in used for name in members):
            groups.append(members)
            used.update(members)
    return groups + [(spec.name,) for spec in specs if spec.name in key and spec.name not in used]


def _candidates(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Groups worth forming, larger first, in model order."""
    folders: dict[str, list[str]] = {}
    for name in names:
        bank, found, expert = name.partition("/experts/")
        folder, leaf = (f"{bank}/experts", expert) if found else name.rsplit("/", 1)
        folders.setdefault(folder, []).append(leaf)
    for folder, leaves in folders.items():
        kind = folder.rpartition("/")[2]
        if kind == "attention":
            component = folder.partition("/")[0]
            kind = f"{component if component in ('vision', 'dflash', 'dflash2') else 'text'} attention"
        for group in _FUSED.get(kind, ()):
            if all(leaf in leaves for leaf in group):
                yield tuple(f"{folder}/{leaf}" for leaf in group)
        if kind == "experts":
            yield tuple(f"{folder}/{leaf}" for leaf in leaves if not leaf.endswith("/down"))
            yield tuple(f"{folder}/{leaf}" for leaf in leaves if leaf.endswith("/down"))
