"""accelerate's parser accepts every configuration file, as its launcher would."""

from __future__ import annotations

import math
from pathlib import Path
from socket import socket

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

FOLDER = Path(__file__).parents[2] / "configs" / "accelerate"
FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
KINDS = {
    "zero3.yaml": DistributedType.DEEPSPEED,
    "cpu_zero2.yaml": DistributedType.DEEPSPEED,
    "cpu_2_processes.yaml": DistributedType.MULTI_GPU,
}


@pytest.mark.parametrize("name", FILES)
def test_configuration_file_is_valid(name: str) -> None:
    config = load_config_from_file(str(FOLDER / name))
    assert config.distributed_type == KINDS.get(name, DistributedType.FSDP)
    assert config.num_processes % config.num_machines == 0


@pytest.mark.parametrize("name", [name for name in FILES if KINDS.get(name) is None])
def test_launcher_environment_has_fsdp2_and_the_mesh_of_the_file(name: str) -> None:
    # Name a free port, because another launch may use accelerate's default port.
    with socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    options = ["--config_file", str(FOLDER / name), "--main_process_port", port]
    arguments = launch_command_parser().parse_args([*options, "script.py"])
    arguments, config, _ = _validate_launch_command(arguments)
    environment = prepare_multi_gpu_env(arguments)
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    assert environment["FSDP_VERSION"] == "2"
    assert environment["FSDP_ACTIVATION_CHECKPOINTING"] == "true"
    if config.parallelism_config:
        sizes = [
            int(environment[f"PARALLELISM_CONFIG_{name}_SIZE"])
            for name in ("DP_REPLICATE", "DP_SHARD", "TP")
        ]
        assert math.prod(sizes) == config.num_processes
