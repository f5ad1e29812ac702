"""The control plane: who runs next, and when what became true may be seen.

``core`` is the worker thread and its mailbox, ``worker`` what happens at each of its boundaries, with at most one model
unit. ``scheduler`` decides order and membership, ``resources`` lanes and resource transactions, ``output`` takes one
model transaction from preview to publication. ``record`` is what is known of one request, ``response`` the path from
the worker to its consumer, ``metrics`` the counters, ``instance`` an opened model.
"""
