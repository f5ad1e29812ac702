"""``python -m ninfer.gateway.cli``."""

from __future__ import annotations

import sys

from ninfer.gateway.cli import main

sys.exit(main())
