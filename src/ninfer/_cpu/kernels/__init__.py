"""Native code of the CPU Ops.

``lanes`` has the pieces of LLVM IR for sixteen fp32 lanes and ``simd`` gives them to Numba code; ``codes`` and
``scales`` decode what matrices are stored as, ``tiles`` multiplies it in registers, ``products`` puts those together.
The others are the kernels of one family of Ops each, after the convention of ``ninfer._cpu.kernel``.
"""
