"""Autograd for tensors of `fake_cuda`, in processes of their own.

A build of torch for CPUs cannot record gradients of CUDA tensors, because nothing in it knows such
devices. The library that is made of `cuda_autograd.cpp` says that there is one. Backward then runs
in a thread of its own, as on a GPU and unlike on a CPU. torch asks once, while it is imported, and
the answer holds for the whole process: so the library is loaded before torch.
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
    """The library, which a compiler makes once for each torch, whose folder it names, in a few
    seconds; skips where there is no compiler.
    """
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler, which autograd on a GPU that is not there needs")
    here = Path(torch.__file__).parent
    content = SOURCE.read_bytes() + f"{torch.__version__} {here}".encode()
    path = BUILD / f"{hashlib.sha256(content).hexdigest()[:16]}.so"
    if not path.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")  # another process may make it, too
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
    """A process with autograd for CUDA tensors, which runs one module-level function after
    another.
    """
    executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    # A process has the environment of whoever starts it.
    with patch.dict(os.environ, LD_PRELOAD=str(library())):
        executor.submit(torch.set_num_threads, 1).result(timeout=120)
    return executor
