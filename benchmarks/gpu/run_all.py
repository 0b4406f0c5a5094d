"""Everything that is measured on one GPU, part by part; or, small, on a CPU.

    python benchmarks/gpu/run_all.py --out gpu_figures --placements DIR --seconds 540 --call 1
    python benchmarks/gpu/run_all.py --out gpu_figures --placements DIR --seconds 540 --call 2
    python benchmarks/gpu/report.py gpu_figures

Where a command may take ten minutes, two calls run all parts; the second one needs the folder that the first one wrote.

Every part runs in a process of its own, within its share of the time, and writes its figures as it finds them: a part that fails
or is stopped takes nothing from the others. The package is used from this clone, installed or not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shlex
import signal
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
# In this order; the numbers are shares of the time. Emulator and report use the cost model of "profile".
PARTS = {"parity": 3, "profile": 2, "kernels": 3, "emulator": 3, "stack": 3, "memory": 1, "overlap": 1, "ranks": 2}
CALLS = {1: ("parity", "profile", "kernels"), 2: ("emulator", "stack", "memory", "overlap", "ranks")}
# A part, whose imports count, is told less than it gets, for what it has begun when the time is over.
TOLD = 0.85
NEEDED = ("numpy", "torch", "transformers", "accelerate", "typer", "rich", "greenlet", "tqdm")


def prepare(out: Path) -> dict[str, Any]:
    """Make the package importable and say what it runs with; ends the program, saying why, where that fails."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"run_all.py needs {', '.join(missing)}, which this Python ({sys.executable}) does not have. Without a network: "
            "`pip download --no-deps --only-binary=:all: --python-version X --platform P NAME` where there is one, then "
            "`pip install --no-index --no-deps --target FOLDER *.whl` here, and add FOLDER to PYTHONPATH."
        )
    sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks"), str(ROOT / "src")]
    try:
        version("hf-distca")
    except PackageNotFoundError:
        # The package announces its version to other ranks: without an installation, from what setup.cfg says.
        line = next(line for line in (ROOT / "setup.cfg").read_text().splitlines() if line.startswith("version"))
        number = line.split("=")[1].strip()
        folder = out / "site" / f"hf_distca-{number}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hf-distca\nVersion: {number}\n")
        sys.path.append(str(folder.parent))
    try:
        importlib.import_module("hf_distca")
    except Exception as error:
        traceback.print_exc()
        found = {name: _version(name) for name in NEEDED}
        sys.exit(f"run_all.py cannot import hf_distca ({type(error).__name__}: {error}); versions here: {found}.")
    from machine import PACKAGES, describe

    return {**describe(), **{name: _version(name) for name in (*PACKAGES, "greenlet", "flash-attn", "flash-attn-4")}}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def gpu() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        sys.exit("run_all.py finds no CUDA device; --device cpu runs the same parts with small sizes.")
    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu memory": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def work(setting: Any, machine: bool) -> None:
    """One part, in its own process."""
    os.setpgid(0, 0)  # so that what the part starts ends with it
    import torch

    if machine:
        setting.put(**gpu())
        return
    if setting.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        importlib.import_module(f"part_{setting.part}").run(setting)
    except BaseException:
        setting.put(failed=traceback.format_exc()[-4000:])
        raise


def run_part(setting: Any, seconds: float, *, machine: bool = False) -> dict[str, Any]:
    """Run a part in a process of its own; kill that, and what it started, after `seconds`."""
    (setting.out / f"{setting.part}.json").unlink(missing_ok=True)  # of an earlier run
    # A fork has imported everything already. Where there is a GPU, an import might touch it, and then it is lost to forks.
    context = get_context("spawn" if setting.device.type == "cuda" else "fork")
    started = time.monotonic()
    process = context.Process(target=work, args=(setting, machine))
    process.start()
    try:
        process.join(seconds)
        status = "ok" if process.exitcode == 0 else "stopped" if process.exitcode is None else "failed"
    finally:
        if process.is_alive():
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                process.kill()
            process.join()
    return {"status": status, "seconds": round(time.monotonic() - started, 1), "allowed": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="sizes that only show that every part works")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    which.add_argument("--call", type=int, choices=CALLS, help="run the parts of the first or of the second of two calls")
    parser.add_argument("--out", type=Path, default=Path("gpu_figures"), help="folder of the figures (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=540, help="for all parts together (default: %(default)s)")
    parser.add_argument("--placements", type=Path, help="folder of placements; without, made-up ones")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    only = arguments.only if arguments.call is None else CALLS[arguments.call]
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    environment = prepare(out)
    import torch

    from gpu_setting import Setting

    def setting(part: str, seconds: float) -> Setting:
        return Setting(part, torch.device(arguments.device), arguments.quick, out, seconds, arguments.placements)

    if arguments.device == "cuda":
        run_part(setting("gpu", 90), 90, machine=True)
        if not (out / "gpu.json").exists():
            sys.exit("run_all.py finds no CUDA device; --device cpu runs the same parts with small sizes.")
        environment |= json.loads((out / "gpu.json").read_text())
    command = shlex.join(["python", *sys.argv])
    path = out / "run.json"
    before = json.loads(path.read_text())["parts"] if path.exists() else {}
    record: dict[str, Any] = {"environment": environment, "command": command, "parts": before}
    parts = [part for part in PARTS if part in only]
    for place, part in enumerate(parts):
        share = PARTS[part] / sum(PARTS[later] for later in parts[place:])
        seconds = max((end - time.monotonic()) * share, 1.0)
        print(f"[{place + 1}/{len(parts)}] {part}: at most {seconds:.0f} s", flush=True)
        record["parts"][part] = {**run_part(setting(part, TOLD * seconds), seconds), "command": command}
        print(f"    {record['parts'][part]['status']} after {record['parts'][part]['seconds']:.0f} s", flush=True)
        path.write_text(json.dumps(record, indent=1))
    if any(record["parts"][part]["status"] != "ok" for part in parts):
        sys.exit(1)


if __name__ == "__main__":
    main()
