from __future__ import annotations

from hypothesis import settings

# Examples are timed by the wall clock: on a busy machine any of them may take longer than the default deadline.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
