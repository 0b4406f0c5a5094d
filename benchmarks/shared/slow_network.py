"""Messages that arrive late, as over a network that is slower than this machine."""

from __future__ import annotations

import time

from hf_distca.runtime.channel import Transfer


class Late:
    """A message that arrives no earlier than a moment, in seconds of `time.perf_counter`."""

    def __init__(self, transfer: Transfer, earliest: float) -> None:
        self.transfer, self.earliest = transfer, earliest

    def wait(self) -> None:
        self.transfer.wait()
        time.sleep(max(0.0, self.earliest - time.perf_counter()))
