"""Autograd for tensors of `fake_cuda`, in separate processes.

A build of torch for CPUs cannot record gradients of CUDA tensors, because no part of it knows such
devices. The library built from `cuda_autograd.cpp` reports one device. Backward then runs in a
separate thread, as on a GPU and unlike on a CPU. torch asks for devices once, during its import, so
the library is loaded before torch.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import subprocess
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

SOURCE = Path(__file__).with_name("cuda_autograd.cpp")
BUILD = Path(__file__).parents[1] / "build" / "cuda_autograd"


def library() -> Path:
    """Return the library. A compiler builds it in a few seconds, once for each torch; without a
    compiler, the test is skipped.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("autograd on a fake GPU needs a C++ compiler, and there is none")
    here = Path(torch.__file__).parent
    content = SOURCE.read_bytes() + f"{torch.__version__} {here}".encode()
    path = BUILD / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")  # another process may build the same file
        options = [
            "-std=c++20",
            "-O0",
            "-fPIC",
            "-shared",
            f"-I{here / 'include'}",
            f"-L{here / 'lib'}",
        ]
        libraries = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{here / 'lib'}"]
        subprocess.run(
            [compiler, *options, str(SOURCE), "-o", str(partial), *libraries],
            check=True,
            timeout=120,
        )
        partial.rename(path)
    return path


def process() -> ProcessPoolExecutor:
    """Start a process with autograd for CUDA tensors. It runs one module-level function after
    another.
    """
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    # The new process inherits this environment.
    with patch.dict(os.environ, LD_PRELOAD=str(library())):
        executor.submit(torch.set_num_threads, 1).result(timeout=120)
    return executor
