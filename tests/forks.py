"""Processes that start in a tenth of a second: forks of one process that has imported the modules
that tests need, and has run no test.

An import of hf_distca takes five seconds of a processor, which a fork saves. Otherwise a fork is as
fresh as a new interpreter: it has the environment of the process that starts it, and one thread,
and it ends as a program does.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Not preloaded: libraries that patch others (TRL) or read settings during their import (trackers).
PRELOADED = [
    "uncollected",
    "torch",
    "hf_distca.integration.training.deal_trainer",
    "hf_distca.pipeline",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "hypothesis",
    "deepspeed",  # if installed, accelerate imports it in each Trainer of several ranks
    "loops",
]
# A fork has only the thread that calls it, so libraries must start none during these imports.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}


def start(
    function: Callable[..., object], *args: Any, daemon: bool = True, **changes: str
) -> ForkServerProcess:
    """Run a module-level function in a new process, which ends after it. `changes` are added to its
    environment.
    """
    process = _context().Process(
        target=_begin, args=({**os.environ, **changes}, function, args), daemon=daemon
    )
    process.start()
    return process


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # The folder of `loops`.
    paths = filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH")))
    # A fork gets the environment of the process that starts it, in `_begin`.
    with patch.dict(os.environ, ONE_THREAD, PYTHONPATH=os.pathsep.join(paths)):
        forkserver.ensure_running()
    return context


def _begin(
    environment: dict[str, str], function: Callable[..., object], args: tuple[Any, ...]
) -> None:
    import torch
    from tqdm import tqdm

    os.environ.clear()
    # Otherwise accelerate gives every rank more threads than there are cores.
    os.environ.update(environment, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    # tqdm's default lock is shared by processes, and stays locked if one of them is killed.
    tqdm.set_lock(threading.RLock())
    # Imported objects stay: no collection has to look at them, not even the one at exit.
    gc.freeze()
    gc.enable()
    code = 0
    try:
        function(*args)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error
        code = 1
    # A fork ends without exit functions and without the end of the interpreter, so run both here:
    # they show threads of gloo that are late or wait forever. If no thread is left, skip the end
    # of the interpreter, which takes half a second.
    if _has_one_thread():
        threading._shutdown()
        atexit._run_exitfuncs()
        if _has_one_thread():
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    ctypes.pythonapi.Py_Exit(code)


def _has_one_thread() -> bool:
    """Return whether this process has one thread, with those of libraries (Linux only)."""
    tasks = Path("/proc/self/task")
    return tasks.exists() and len(list(tasks.iterdir())) == 1
