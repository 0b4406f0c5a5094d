"""Everything that one GPU can measure, part by part, the most important first; also small on a CPU.

    python benchmarks/gpu/run_all.py --list
    python benchmarks/gpu/run_all.py --out gpu_figures --placements DIR --seconds 480
    python benchmarks/gpu/run_all.py --out gpu_figures --placements DIR --seconds 480
    python benchmarks/gpu/report.py gpu_figures

A call runs the parts for which it has time, in the order of the list. A second call continues with
the parts that were left out or did not end. `--only` runs the named parts whether or not they ran
before.

Every part runs in a separate process and writes its figures as it finds them, so that a part that
fails or is stopped does not affect the others. While a part measures, the process of the next part
imports what it needs and then waits for its turn. The package is imported from this clone,
installed or not.
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
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Part(NamedTuple):
    """The title of a part, and its approximate seconds on an H100 with FlashAttention 4."""

    seconds: int
    title: str


PARTS = {
    "checkpointing": Part(
        90, "activation checkpointing on one GPU: the gain of keeping attention outputs"
    ),
    "host": Part(60, "host cost of a layer, in steps so small that the GPU waits"),
    "emulator": Part(80, "kernel seconds of 8 and 64 ranks, before and after balancing"),
    "trainer": Part(120, "the Trainer on two ranks over NCCL with moved work, vs. sdpa"),
    "first_script": Part(90, "the README's script, dealt to two ranks over NCCL, vs. one process"),
    "kernels": Part(90, "rates of whole documents, slices, rebatched tasks"),
    "memory": Part(25, "peak bytes at 64K tokens vs. plain attention and the simulator"),
    "ranks": Part(60, "two and four ranks over NCCL vs. sdpa"),
    "parity": Part(60, "kernels vs. float32"),
    "faults": Part(60, "a rank that fails or is killed while the other one waits over NCCL"),
    "widths": Part(60, "rates of gpt-oss's and Gemma's heads, and of their short slices"),
    "curves": Part(330, "1.3 billion weights, 200 steps of 16K tokens: losses vs. sdpa"),
    "families": Part(60, "model families in bfloat16 vs. float32"),
    "hybrids": Part(90, "hybrids in bfloat16 with kernels of fla and mamba-ssm, vs. float32"),
}
# A part that takes longer than expected may take this many times its seconds before it is stopped,
# if there is time.
PATIENCE = 1.5
# A part plans with this share of its time; the rest is for work in progress.
TOLD = 0.85
NEEDED = ("numpy", "torch", "transformers", "accelerate", "typer", "rich", "greenlet", "tqdm")


def prepare(out: Path) -> dict[str, Any]:
    """Make the package importable and describe the environment; exit with an error on failure."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        sys.exit(
            f"run_all.py needs {', '.join(missing)}, which this Python ({sys.executable}) does not"
            " have. Without a network: `pip download --no-deps --only-binary=:all:"
            " --python-version X --platform P NAME` where there is one, then `pip install"
            " --no-index --no-deps --target FOLDER *.whl` here, and add FOLDER to PYTHONPATH."
        )
    sys.path[:0] = [*map(str, (ROOT / "benchmarks").glob("*/")), str(ROOT / "src")]
    from machine import describe

    # Keep compiled kernels of FlashAttention 4 for the following parts.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(out / "compiled"))
    try:
        version("hf-distca")
    except PackageNotFoundError:
        # The package announces its version to other ranks. Without an installation, the version
        # comes from setup.cfg.
        line = next(
            line
            for line in (ROOT / "setup.cfg").read_text().splitlines()
            if line.startswith("version")
        )
        number = line.split("=")[1].strip()
        folder = out / "site" / f"hf_distca-{number}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: hf-distca\nVersion: {number}\n"
        )
        sys.path.append(str(folder.parent))
    # Parts start rank processes, which must find the same modules.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        importlib.import_module("hf_distca")
    except Exception as error:
        traceback.print_exc()
        sys.exit(
            f"run_all.py cannot import hf_distca ({type(error).__name__}: {error}); versions:"
            f" {describe(*NEEDED)}."
        )
    return describe("greenlet", "flash-attn", "flash-attn-4", "trl")


def describe_gpu() -> dict[str, Any]:
    """Describe the card, the driver and the libraries."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "run_all.py finds no CUDA device; --device cpu runs the same parts with small sizes."
        )
    from clocks import read_card

    found = torch.cuda.get_device_properties(0)
    return {
        "gpu": found.name,
        "gpu memory": found.total_memory,
        "capability": f"{found.major}.{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **read_card(),
    }


def work(setting: Any, turn: Connection) -> None:
    """Run one part in its own process: import it, wait for its turn, measure."""
    os.setpgid(0, 0)  # a process group, so that everything that the part starts ends with it
    import torch

    if setting.part == "gpu":
        turn.recv()
        setting.put(**describe_gpu())
        return
    if setting.device.type == "cpu":
        torch.set_num_threads(1)
    try:
        part = importlib.import_module(f"part_{setting.part}")
        # A part with several ranks starts them before its turn.
        ready = [part.prepare(setting)] if hasattr(part, "prepare") else []
        seconds = turn.recv()
        part.run(replace(setting, seconds=seconds, started=time.monotonic()), *ready)
        if setting.figures.get("failed"):
            sys.exit(1)  # its ranks failed, and its file has the reason
    except EOFError:  # its turn never comes
        os.killpg(0, signal.SIGKILL)  # end the processes that were started for it as well
    except Exception:
        setting.put(failed=traceback.format_exc()[-4000:])
        raise


class Started(NamedTuple):
    """A part's process, which waits for its turn."""

    setting: Any
    process: BaseProcess
    turn: Connection

    @classmethod
    def of(cls, setting: Any) -> Started:
        # A fork inherits all imports. Where there is a GPU, an import might touch it, and forks
        # would lose it.
        context = get_context("spawn" if setting.device.type == "cuda" else "fork")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(setting, receive))
        process.start()
        receive.close()
        return cls(setting, process, send)

    def run(self, seconds: float) -> dict[str, Any]:
        """Let the part run; after `seconds`, kill it and everything it started."""
        began = time.monotonic()
        with suppress(BrokenPipeError):  # the import failed, and the part's file has the reason
            self.turn.send(TOLD * seconds)
        self.process.join(seconds)
        exitcode = self.process.exitcode
        status = "ok" if exitcode == 0 else "stopped" if exitcode is None else "failed"
        self.end()
        return {
            "status": status,
            "seconds": round(time.monotonic() - began, 1),
            "allowed": round(seconds, 1),
        }

    def end(self) -> None:
        """Kill the process and everything it started."""
        self.turn.close()
        if self.process.is_alive():
            try:
                os.killpg(self.process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            except ProcessLookupError:
                self.process.kill()
            self.process.join()


def is_done(out: Path, part: str, record: dict[str, Any]) -> bool:
    """Return whether a part ended in an earlier call and left nothing out."""
    path = out / f"{part}.json"
    ended = record["parts"].get(part, {}).get("status") == "ok" and path.exists()
    return ended and not json.loads(path.read_text()).get("left_out")


def run_parts(
    wanted: list[str], make: Any, end: float, record: dict[str, Any], path: Path
) -> list[str]:
    """Run the parts in order while there is time; return those that were left out."""
    from clocks import watching_clocks

    waiting = []
    started: Started | None = None
    for place, part in enumerate(wanted):
        left = end - time.monotonic()
        if left < 0.6 * PARTS[part].seconds and not make(part).quick:
            waiting.append(part)
            continue
        current = (
            started
            if started is not None and started.setting.part == part
            else Started.of(make(part))
        )
        started = None
        following = wanted[place + 1 :]
        if following and left > PARTS[part].seconds:
            started = Started.of(make(following[0]))
        seconds = max(min(left, PATIENCE * PARTS[part].seconds), 1.0)
        print(
            f"[{place + 1}/{len(wanted)}] {part}: {PARTS[part].title}; about"
            f" {PARTS[part].seconds} s",
            flush=True,
        )
        (path.parent / f"{part}.json").unlink(missing_ok=True)  # from an earlier run
        with watching_clocks() as clocks:
            record["parts"][part] = {**current.run(seconds), "command": record["command"]}
        if clocks:
            record["parts"][part]["clocks"] = [min(clocks), max(clocks)]
        print(
            f"    {record['parts'][part]['status']} after {record['parts'][part]['seconds']:.0f} s",
            flush=True,
        )
        path.write_text(json.dumps(record, indent=1))
        if (
            started is not None
            and time.monotonic() > end - 0.6 * PARTS[following[0]].seconds
            and not started.setting.quick
        ):
            started.end()
            started = None
    if started is not None:
        started.end()
    return waiting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="device (default: %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="use small sizes that only show that every part works"
    )
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, help="run these parts, even if they ran before"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("gpu_figures"),
        help="folder of the figures (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds", type=float, default=480, help="total time (default: %(default)s)"
    )
    parser.add_argument(
        "--placements", type=Path, help="folder of placements (default: made-up ones)"
    )
    parser.add_argument(
        "--list", action="store_true", help="only print the parts and their expected seconds"
    )
    arguments = parser.parse_args()
    if arguments.list:
        for name, part in PARTS.items():
            print(f"{name:14} {part.seconds:4} s  {part.title}")
        print(f"{'together':14} {sum(part.seconds for part in PARTS.values()):4} s")
        return
    end = time.monotonic() + arguments.seconds
    arguments.out.mkdir(parents=True, exist_ok=True)
    out = arguments.out.resolve()
    environment = prepare(out)
    import torch

    from gpu_setting import Setting

    def make(part: str) -> Setting:
        return Setting(
            part, torch.device(arguments.device), arguments.quick, out, 0.0, arguments.placements
        )

    path = out / "run.json"
    if arguments.device == "cuda":
        (out / "gpu.json").unlink(missing_ok=True)
        Started.of(make("gpu")).run(90)
        if not (out / "gpu.json").exists():
            sys.exit(
                "run_all.py finds no CUDA device; --device cpu runs the same parts with small"
                " sizes."
            )
        environment |= json.loads((out / "gpu.json").read_text())
    before = json.loads(path.read_text())["parts"] if path.exists() else {}
    command = shlex.join(["python", *sys.argv])
    record: dict[str, Any] = {"environment": environment, "command": command, "parts": before}
    wanted = [part for part in PARTS if part in (arguments.only or PARTS)]
    if arguments.only is None:
        wanted = [part for part in wanted if not is_done(out, part, record)]
    record["left_out"] = run_parts(wanted, make, end, record, path)
    path.write_text(json.dumps(record, indent=1))
    if record["left_out"]:
        print(f"no time for {', '.join(record['left_out'])}: the same call again runs them")
    if any(
        record["parts"][part]["status"] != "ok" for part in wanted if part not in record["left_out"]
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
