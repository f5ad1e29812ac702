"""The Qwen3.5 family: hybrid models of Gated DeltaNet and gated full-attention layers, dense and mixture of experts.

``config`` reads component configs, ``parameters`` names every weight, ``recipes`` and ``packing`` say how weights are
stored, ``state`` what a sequence owns. Everything here is written against ``ninfer.ops`` and runs on any device.
"""
