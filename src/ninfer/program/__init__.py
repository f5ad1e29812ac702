"""The physical plane: who owns device memory, what a sequence has there, and what one unit of work does to it.

``opening`` starts a ``program.Program``. Below it: ``layout``, ``capacity`` and ``licensing`` are the arithmetic of
pages; ``pages``, ``kv`` and ``state`` the stores; ``transactions`` changes ownership; ``scope`` and ``memory`` plan
and carve device memory; ``text`` places the model in it; ``frame``, ``filling`` and ``units`` run it; ``sequence`` and
``batch`` are what is known of a sequence and of a pending model transaction; ``traffic`` counts bytes.
"""
