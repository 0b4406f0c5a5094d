"""Two nodes on one machine: network namespaces, joined by a cable, with different host names."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parents[1]
# Each namespace gets a host name, because hf_distca recognizes nodes by it.
_WITH_NAME = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"']


class Node(NamedTuple):
    """A network namespace.

    Attributes:
        number: its index.
        namespace: its name, which is also the host name inside.
    """

    number: int
    namespace: str

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    def inside(self, words: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on this node."""
        return ["ip", "netns", "exec", self.namespace, *_WITH_NAME, self.namespace, *words]

    def set_cable(self, state: str) -> None:
        """Plug the cable in ("up") or out ("down")."""
        _ip("-n", self.namespace, "link", "set", "eth0", state)

    def kill(self) -> None:
        """Kill every process on this node, as a power loss does."""
        while pids := _ip("netns", "pids", self.namespace).split():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)


class Command:
    """A shell command on a node, or on the machine itself if `node` is None. `variables` are added
    to its environment.
    """

    def __init__(self, command: str, node: Node | None, folder: Path, **variables: str) -> None:
        self.file = folder / f"output-{time.monotonic_ns()}.txt"
        words = ["bash", "-c", command]
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        with self.file.open("wb") as output:
            self._process = subprocess.Popen(
                words if node is None else node.inside(words),
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.file.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait for the exit code.

        Raises:
            AssertionError: with its output, if it takes longer than `timeout` seconds.
        """
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s:\n{self.output}") from None

    def wait_for(self, text: str, timeout: float) -> None:
        """Wait until the command has printed a text."""
        deadline = time.monotonic() + timeout
        while text not in self.output:
            assert self._process.poll() is None, f"ended without {text!r}:\n{self.output}"
            assert time.monotonic() < deadline, f"no {text!r} after {timeout:g} s:\n{self.output}"
            time.sleep(0.1)


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Create two nodes that reach each other over eth0. At the end, kill every process on them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("nodes are network namespaces, which need root and the command ip")
    nodes = [Node(number, f"distca-{os.getpid()}-{number}") for number in range(2)]
    made = []
    try:
        for node in nodes:
            try:
                _ip("netns", "add", node.namespace)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"this machine has no network namespaces: {error.stderr.strip()}")
            made.append(node)
        first, second = (node.namespace for node in nodes)
        ends = f"eth0 netns {first} type veth peer name eth0 netns {second}"
        _ip("link", "add", *ends.split())
        for node in nodes:
            _ip("-n", node.namespace, "address", "add", f"{node.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", node.namespace, "link", "set", interface, "up")
        yield nodes
    finally:
        for node in made:
            node.kill()
            _ip("netns", "delete", node.namespace)


def _ip(*words: str) -> str:
    return subprocess.run(
        ["ip", *words], check=True, capture_output=True, text=True, timeout=20
    ).stdout
