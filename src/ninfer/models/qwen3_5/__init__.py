"""The Qwen3.5 family: config, parameters, and the fixed call order of one forward pass."""
