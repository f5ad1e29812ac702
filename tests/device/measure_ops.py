"""Times the Ops: the cases of ``examples/benchmarks/cuda_ops.py``."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

BENCHMARK = Path(__file__).parents[2] / "examples" / "benchmarks" / "cuda_ops.py"


def main(device: Any) -> list[tuple[str, str]]:
    """Rows of (what, figure)."""
    spec = importlib.util.spec_from_file_location("cuda_ops", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    results = module.run(device)
    return [(r["case"], f"{r['us']:.1f} us, {r['GB/s']:.0f} GB/s, {r.get('ratio', 0):.2f} of reads") for r in results]
