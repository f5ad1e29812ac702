"""The control plane: who runs next, what it starts from, and when what became true may be seen.

``core`` is the worker thread and its mailbox, ``worker`` what happens at each of its boundaries: ``admission`` (waiting
requests get lanes, rows their checkpoints), ``pausing``, ``units`` (at most one model unit) and ``requests`` (the one
end of each). ``scheduler`` decides order and membership, ``output`` takes one model transaction from preview to commit,
``pacing`` says how many drafts its rows have (``pace`` chooses, ``prices`` knows what rounds take), ``outbox``
publishes. ``record`` is what is known of one request, ``response`` the path from the worker to its consumer.

``resources`` owns the lanes, what is kept of finished requests and the one open resource transaction. ``catalogue``
holds the kept histories, ``shortlist`` finds them by digest, ``sessions`` by name, ``retention`` says how their worth
fades. ``sources`` and ``captures`` say what a request may start from and where it should leave checkpoints; ``choices``
puts that to the ``planner`` as a ``question``; its ``search`` weighs targets by ``costs`` (``measuring`` measures
them). ``reuse`` and ``metrics`` are the counters, ``settings`` the resolved options, ``instance`` an opened model.
"""
