"""Atomic addition to memory that is known by its address; ``cuda.atomic`` wants Numba's arrays."""

from __future__ import annotations

from typing import Any

from numba import config, cuda, types

if config.ENABLE_CUDASIM:  # addresses are arrays there

    @cuda.jit(device=True)
    def atomic_add(array: Any, index: int, value: Any) -> Any:
        return cuda.atomic.add(array, index, value)

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
