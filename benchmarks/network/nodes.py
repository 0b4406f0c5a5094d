"""Two nodes on one machine: network namespaces with a cable of any rate between them.

Linux limits the rate (https://man7.org/linux/man-pages/man8/tc-tbf.8.html), which needs root and
the commands ip and tc.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = "eth0"
_WAITING = "250ms"  # that bytes may wait for the cable; TCP slows down when the queue is full
_BURST = 1 << 18  # bytes that pass at once: more than the cable carries in a tick of the clock


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Make two nodes with a cable of unlimited rate.

    Yields:
        The names of both nodes, for `wrap_command` and `set_rate`. Processes on them must end
            first.

    Raises:
        RuntimeError: if this machine has no namespaces, or this user may not make them.
    """
    names, made = [f"distca-nodes-{os.getpid()}-{node}" for node in range(2)], []
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = names
        ends = f"{CABLE} netns {first} type veth peer name {CABLE} netns {second}"
        _run("ip", "link", "add", *ends.split())
        for node, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"10.78.0.{node + 1}/24", "dev", CABLE)
            for device in ("lo", CABLE):
                _run("ip", "-n", name, "link", "set", device, "up")
        set_rate(names, 1e9)
        yield names
    finally:
        for name in made:
            _run("ip", "netns", "delete", name)


def wrap_command(name: str, words: list[str]) -> list[str]:
    """Return the command that runs `words` on a node."""
    return ["ip", "netns", "exec", name, *words]


def set_rate(names: list[str], rate: float) -> None:
    """Limit the cable to `rate` bytes per second in each direction."""
    for name in names:
        shape = f"rate {8 * rate:.0f} burst {_BURST} latency {_WAITING}"
        _run(*f"tc -n {name} qdisc replace dev {CABLE} root tbf {shape}".split())


def _run(*words: str) -> None:
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.CalledProcessError) as error:
        said, command = getattr(error, "stderr", None) or str(error), " ".join(words)
        message = f"nodes are network namespaces, and `{command}` failed: {said.strip()}"
        raise RuntimeError(message) from error
