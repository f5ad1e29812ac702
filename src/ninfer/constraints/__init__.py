"""Output constraints: a text language becomes a grammar over tokens. Knows bytes and tokens, not models.

``output`` holds the value a caller makes; its ``language`` is a Grammar (``ir``), which ``recognise`` decides exactly.
Front ends: ``gbnf``, ``regex`` and ``direct`` (choices), and for JSON Schema, in this order, ``source`` (text to a tree
with places), ``schema`` (keywords), ``assertions`` and ``denials`` (one schema as branches by type), ``reduce``
(intersections), ``graph`` (what has a value), ``json_lang`` and ``containers`` (rules).

At run time ``service`` turns a plan into a ``matcher`` and ``masks`` lends it to a batch; ``compose`` puts the thinking
around a turn, ``cache`` keeps what was compiled. ``emit`` and ``xgrammar`` parse what callers wrote rule by rule, if
``breadth`` allows; ``pushdown`` what this library wrote. It moves between ``points``, asks ``regions`` which texts come
next and ``content`` what may be inside a string (``insides`` keeps it), and looks ahead in ``warmup``. Below it is the
vocabulary: ``vocab``, as texts in order ``lexicon``, as a trie ``tokentrie``, read as string content ``reading``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ninfer.constraints.output import OutputConstraint, language

__all__ = ["OutputConstraint", "language"]


def __getattr__(name: str) -> Any:
    """The front ends come when a constraint is first made: a worker that only hands masks on needs none of them."""
    if name in __all__:
        from ninfer.constraints import output

        return getattr(output, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
