"""Imported for what it does: nothing looks for garbage among what is imported after it."""

from __future__ import annotations

import gc

gc.disable()
