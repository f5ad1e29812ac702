"""Checkpoints become artifacts.

``hf_config`` reads ``config.json``, ``checkpoint`` the safetensors files; ``sources`` says where each parameter lies
in them, ``quantised`` how it is stored there; ``planning`` decides formats, parents and offsets; ``streaming`` fills
them in row blocks; ``resources`` are copied; ``convert`` runs it all.
"""

from ninfer.convert.convert import RECIPES, ConversionReport, convert

__all__ = ["RECIPES", "ConversionReport", "convert"]
