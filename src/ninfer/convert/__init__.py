"""Checkpoints (safetensors) become artifacts: sources, recipes, quantisers."""
