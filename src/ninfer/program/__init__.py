"""The physical plane: who owns device memory, what a sequence has there, and what one unit of work does to it.

``layout``, ``capacity`` and ``licensing`` are the arithmetic of pages; ``pages``, ``kv`` and ``state`` the stores;
``scope`` plans and carves memory.
"""
