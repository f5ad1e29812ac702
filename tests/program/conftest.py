"""The fakes folder, and a driver that plays the control plane."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))
