"""Ops and Device on a CUDA GPU.

``driver`` is the one door to CUDA, through CuPy; ``compile`` turns kernel sources into machine code kept on disk,
``launch`` loads and starts it; ``buffers`` names device memory, ``residency`` fills it with weights; ``streams`` holds
what orders work; ``device`` is the Device; ``ops``, ``products``, ``experts`` and ``sampling`` turn an Op into
launches, ``shares`` says which rows each block of a product works on. Kernels are CUDA C++ in ``kernels/*.cu`` where
bandwidth or tensor cores decide, and Numba functions (``sampler_kernels``, compiled by ``numba_kernels``) where control
flow does.
Importing a module of this room touches no GPU; only compiling and running need CUDA's packages.
"""
