"""The physical plane: who owns device memory, what a sequence has there, and what one unit of work does to it.

``opening`` starts a ``program.Program``. Its parts, from what it stands on to what it does:

    layout, capacity, licensing   arithmetic of pages
    scope, memory, text           device memory planned and carved, the model placed in it
    stores                        pages, spaces, state images, host memory; ``transfers`` copies between them
    sequence, history, store      active rows, what finished ones left, all of it together; ``auditing`` walks it
    admission, incoming, ladders, projection, planning      pure questions about what would fit
    transactions, taking, outcomes                          changes of ownership and placement
    frame, filling, recordings, units, rounds, batch        model units and their pending outcome; ``traffic`` counts
    drafting, blocks, argmax                                what drafts inside them
"""

from ninfer.program.capacity import AutomaticKV, ExplicitKV, Retention
from ninfer.program.layout import KVCodec
from ninfer.program.memory import Shape
from ninfer.program.opening import open_program
from ninfer.program.program import Program
from ninfer.program.text import QwenText

__all__ = ["AutomaticKV", "ExplicitKV", "KVCodec", "Program", "QwenText", "Retention", "Shape", "open_program"]
