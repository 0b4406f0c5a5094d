"""Two nodes on one machine: network namespaces with a cable between them, as slow as is asked for.

Linux does it (https://man7.org/linux/man-pages/man8/tc-tbf.8.html). It takes root's rights and the
commands ip and tc.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

CABLE = "eth0"
_WAITING = "250ms"  # of bytes that wait for the cable; TCP slows down where there is no room
_BURST = 1 << 18  # bytes that go at once; the cable carries fewer in a tick of the clock


@contextmanager
def two_nodes() -> Iterator[list[str]]:
    """Make two nodes with a cable that is not slow.

    Yields:
        Their names, which `inside` and `set_rate` take. What runs there has ended before this does.

    Raises:
        RuntimeError: if this machine has no namespaces, or this user may not make any.
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


def inside(name: str, words: list[str]) -> list[str]:
    """What runs a command on a node."""
    return ["ip", "netns", "exec", name, *words]


def set_rate(names: list[str], rate: float) -> None:
    """Let the cable carry so many bytes per second in each direction."""
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
