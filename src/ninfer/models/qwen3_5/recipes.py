"""Recipes: which number format stores a matrix, as data.

A recipe is an ordered list of ``(role pattern, format)``; the first pattern that matches a parameter's role wins. Roles
are parameter names without layer and expert numbers.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from ninfer.models.qwen3_5.parameters import ParameterSpec

Recipe = tuple[tuple[str, str], ...]

BF16, FP8 = "bf16", "fp8_e4m3fn_row_bf16"
Q4, Q5, Q6, Q8 = "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16"

# A few rows that steer many others: the decay and write gates, the choice of experts. And the head for drafting alone,
# whose rounding costs a draft now and then.
_SMALL: Recipe = (("*/a_projection", BF16), ("*/b_projection", BF16), ("*/router", BF16), ("*/shared_score", BF16),
    ("*/kernel_projection", BF16), ("*/candidate_selector/*", BF16), ("proposal/head", Q4),
)  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "bf16": (("*", BF16),),
    "fp8": (*_SMALL, ("*", FP8)),
    "q8": (*_SMALL, ("*", Q8)),
    "q6": (*_SMALL, ("*", Q6)),
    "q4-mixed": (
        *_SMALL,
        ("text/token_embedding", Q6),
        ("text/output_head", Q6),
        ("mtp/*", Q8),
        ("dflash/*", Q8),
        ("dflash2/*", Q8),
        ("vision/patch_embedding", Q6),
        ("vision/merger/*", Q8),
        ("*/moe/shared/*", Q8),
        ("*/query", Q4),
        ("*/key", Q4),
        ("*/attention/gate", Q5),
        ("vision/*/value", Q4),
        ("vision/*/fc1", Q4),
        ("*/gate", Q4),
        ("*/up", Q4),
        ("*", Q5),
    ),
}


def storage_format(recipe: Recipe, spec: ParameterSpec) -> str:
    """The format ``recipe`` stores a parameter in. Direct parameters keep their own."""
    if spec.format is not None:
        return spec.format
    return next(form for pattern, form in recipe if fnmatchcase(spec.role, pattern))
