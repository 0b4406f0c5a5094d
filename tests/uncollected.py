"""Imported for its effect: it disables the garbage collector for later imports."""

from __future__ import annotations

import gc

gc.disable()
