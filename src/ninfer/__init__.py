"""ninfer: embeddable inference for the Qwen3.5 family."""

from ninfer.errors import NinferError

__version__ = "0.1.0"
__all__ = ["NinferError"]
