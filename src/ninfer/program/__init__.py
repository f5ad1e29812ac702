"""The physical plane: who owns device memory, what a sequence has there, and what one unit of work does to it.

``opening`` starts a ``program.Program``. Below it: ``layout``, ``capacity`` and ``licensing`` are the arithmetic of
pages; ``pages``, ``kv`` and ``state`` the stores; ``transactions`` changes ownership; ``scope`` and ``memory`` plan
and carve device memory; ``text`` places the model in it; ``frame``, ``filling`` and ``units`` run it; ``sequence`` and
``batch`` are what is known of a sequence and of a pending model transaction; ``traffic`` counts bytes.
"""

from ninfer.program.capacity import AutomaticKV, ExplicitKV, Retention
from ninfer.program.layout import KVCodec
from ninfer.program.memory import Shape
from ninfer.program.opening import open_program
from ninfer.program.program import Program
from ninfer.program.text import QwenText

__all__ = ["AutomaticKV", "ExplicitKV", "KVCodec", "Program", "QwenText", "Retention", "Shape", "open_program"]
