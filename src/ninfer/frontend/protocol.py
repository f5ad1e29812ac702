"""The text markers of the family's chat protocol."""

from __future__ import annotations

TURN_OPEN = "<|im_start|>"
TURN_CLOSE = "<|im_end|>"
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
CANONICAL_CLOSE = f"\n{THINK_CLOSE}\n\n"
"""How a template writes the end of the thinking, and what a forced close appends."""
CALL_OPEN = "<tool_call>"
CALL_CLOSE = "</tool_call>"
RESULT_OPEN = "<tool_response>"
RESULT_CLOSE = "</tool_response>"
