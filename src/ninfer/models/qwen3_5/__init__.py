"""The Qwen3.5 family: hybrid models of Gated DeltaNet and gated full-attention layers, dense and mixture of experts.

``config`` reads component configs and ``parameters`` names every weight; ``recipes`` and ``packing`` say how weights
are stored; ``bind`` makes an artifact's weights (``weights``) resident; ``state`` is what a sequence owns; ``forward``
is the fixed call order of one pass. ``geometries``, ``synthetic`` and ``synthetic_text`` compose models of random
weights. Everything here is written against ``ninfer.ops`` and runs on any device.
"""
