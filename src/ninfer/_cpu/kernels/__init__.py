"""Native code of the CPU Ops.

``simd`` gives sixteen fp32 lanes, ``codes`` turns stored bytes into them, ``products`` multiplies matrices with them;
the others are the kernels of one family of Ops each. Every kernel follows the convention of ``ninfer._cpu.kernel``.
"""
