"""Run a training script in the workers of Ray Train instead of in processes of torchrun.

    python examples/train_with_ray.py --workers 2 examples/finetune_long_documents.py --max_steps 4

Ray sets the same environment variables as torchrun (RANK, WORLD_SIZE, LOCAL_RANK, ...), and starts
torch.distributed. Scripts need no change. Paths in their arguments should be absolute, because
workers may start in another folder.

To install Ray Train:

    pip install "ray[train]"
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer


def run_script(settings: dict[str, Any]) -> None:
    """Run the script in this worker."""
    sys.argv = settings["command"]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers", type=int, default=2, help="number of processes; Ray chooses the nodes"
    )
    parser.add_argument("--use_gpu", action="store_true", help="give each worker a GPU")
    parser.add_argument("script", type=Path, help="a training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    given = parser.parse_args()
    TorchTrainer(
        run_script,
        train_loop_config={"command": [str(given.script.resolve()), *given.arguments]},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.use_gpu),
    ).fit()


if __name__ == "__main__":
    main()
