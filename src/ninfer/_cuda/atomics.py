"""Atomic addition to memory that is known by its address; ``cuda.atomic`` wants Numba's arrays."""

from __future__ import annotations

import threading
from typing import Any

from numba import config, types

if config.ENABLE_CUDASIM:  # addresses are arrays there, and threads are threads
    _adding = threading.Lock()

    def atomic_add(array: Any, index: int, value: Any) -> Any:
        with _adding:
            before = array[index]
            array[index] = before + value
        return before

else:
    from numba.cuda.extending import intrinsic

    @intrinsic
    def atomic_add(typingctx: Any, pointer: Any, index: Any, value: Any) -> Any:
        """Add an integer to ``pointer[index]``; what was there."""
        signature = pointer.dtype(pointer, types.intp, pointer.dtype)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            base, at, amount = arguments
            return builder.atomic_rmw("add", builder.gep(base, [at]), amount, "monotonic")

        return signature, codegen
