from __future__ import annotations

import sys
from pathlib import Path

for folder in ("models", "runtime"):  # tiny models of every family, random relays
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
