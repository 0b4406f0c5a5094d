"""Commands run in forks: the processes that `python SCRIPT`, `torchrun SCRIPT` or `accelerate
launch SCRIPT` would start, without the time of imports.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from socket import socket
from typing import Any

import forks

TESTS = Path(__file__).parent


def run(command: Sequence[str], folder: Path, *, timeout: float = 180.0) -> str:
    """Run a command in `folder` and return its output.

    Raises:
        AssertionError: with the output, if the command failed or took longer than `timeout`
            seconds.
    """
    match command:
        case ["python", *script]:
            return _run(script, [{}], folder, timeout)
        case ["torchrun", "--nproc_per_node", size, *script]:
            return _run(script, _make_environments(int(size), find_free_port()), folder, timeout)
        case ["accelerate", "launch", *options]:
            return _run(*_read_launch(options), folder, timeout)
        case ["hf-distca" | "pytest" as name, *arguments]:
            return _run(
                [str(Path(sys.executable).with_name(name)), *arguments], [{}], folder, timeout
            )
    raise ValueError(f"this cannot be run as a fork: {command}")


def _read_launch(options: list[str]) -> tuple[list[str], list[dict[str, str]]]:
    """Return the script with its arguments, and the environment of each rank. accelerate reads its
    options itself; only torchrun is skipped.
    """
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    port = find_free_port()
    arguments, *_ = _validate_launch_command(
        launch_command_parser().parse_args(["--main_process_port", port, *options])
    )
    if not arguments.multi_gpu:
        raise ValueError(f"accelerate would start one process: {options}")
    shared = prepare_multi_gpu_env(arguments)
    return ["-m"] * bool(arguments.module) + [
        arguments.training_script,
        *arguments.training_script_args,
    ], [shared | rank for rank in _make_environments(arguments.num_processes, port)]


def find_free_port() -> str:
    """Find a port of this host at which no process listens."""
    with socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def _make_environments(size: int, port: str) -> list[dict[str, str]]:
    """Return the environment that torchrun gives to each rank."""
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    shared |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]


def _run(
    script: list[str], environments: list[dict[str, str]], folder: Path, timeout: float
) -> str:
    output = folder / "output.txt"
    output.write_bytes(b"")
    started = [
        forks.start(_be_program, script, folder, output, daemon=False, **changes)
        for changes in environments
    ]
    try:
        ended = _wait(started, time.monotonic() + timeout)
    finally:
        for process in started:
            _kill(process)
    text = output.read_text(errors="replace")
    if not ended:
        raise AssertionError(f"{script} took longer than {timeout:g} s:\n{text}")
    codes = [process.exitcode for process in started]
    if any(codes):
        raise AssertionError(f"{script} ended with {codes}:\n{text}")
    return text


def _wait(processes: list[ForkServerProcess], deadline: float) -> bool:
    """Return whether all processes ended in time. If one fails, do not wait for the others."""
    while any(process.is_alive() for process in processes) and not any(
        process.exitcode for process in processes
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _kill(process: ForkServerProcess) -> None:
    """Kill a process and all that it started."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # the group has ended, or the process has not made it yet
        process.kill()
    process.join()


def _be_program(script: list[str], folder: Path, output: Path) -> None:
    os.setpgid(0, 0)
    log = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(folder)
    _keep_caches_in(folder)
    _fork_what_it_spawns()
    paths = [path for path in sys.path if not Path(path).is_relative_to(TESTS)]
    if script[0] == "-m":
        sys.argv, sys.path = script[1:], [str(folder), *paths]
        runpy.run_module(script[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path = script, [str(Path(script[0]).parent), *paths]
        runpy.run_path(script[0], run_name="__main__")


def _keep_caches_in(folder: Path) -> None:
    import datasets

    datasets.config.HF_DATASETS_CACHE = folder / "cache"


def _fork_what_it_spawns() -> None:
    """Replace spawned processes, which import every module again, by forks. Check that the function
    can be pickled, which a spawn needs.
    """
    from torch import multiprocessing

    def spawn(function: Callable[..., object], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
        pickle.dumps((function, args))
        multiprocessing.start_processes(function, args, nprocs, start_method="fork")

    multiprocessing.spawn = spawn
