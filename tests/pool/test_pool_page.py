"""The commands of the page on pools, as a user types them."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pages import words_of
from test_example import run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ["--max_length", "512", "--max_steps", "2", "--use_cpu"]
SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = dict(hidden_size=32, intermediate_size=32, vocab_size=32)
sizes |= dict(num_hidden_layers=1, num_attention_heads=2)
model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="distca"))
ids = torch.zeros(1, 4096, dtype=torch.int64)
for _ in range(4):
    model(input_ids=ids, labels=ids).loss.backward()
"""


def test_an_example_trains_with_a_server_of_its_launch(tmp_path: Path) -> None:
    command = words_of(
        "hf-distca run --servers 1 accelerate launch --config_file"
        " configs/accelerate/cpu_2_processes.yaml --num_processes 3"
        " examples/train_with_accelerate.py"
    )
    output = run_program([*command, *SMALL, "--output_dir", "out"], tmp_path, timeout=250)
    assert "is rank 2 of 3" in output
    assert "ended: the run is over" in output
    assert "micro-batches on 3 ranks" in output


def test_a_server_by_itself_serves_a_run_that_names_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    (tmp_path / "train.py").write_text(SCRIPT)
    serve = words_of("hf-distca serve --address 10.0.0.7:29600 --device cuda:0")
    serve = [
        str(Path(sys.executable).with_name("hf-distca")),
        *serve[1:3],
        address,
        "--device",
        "cpu",
    ]
    train = words_of(
        "hf-distca run --server-address 10.0.0.7:29600 --server-address 10.0.0.7:29601 accelerate"
        " launch train.py"
    )
    train = [*train[:3], address, *train[6:8], "--cpu", "--num_processes", "1", train[8]]
    with subprocess.Popen(
        [*serve, "--wait", "200"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as server:
        try:
            output = run_program(train, tmp_path, timeout=200)
            said = server.communicate(timeout=30)[1]
        finally:
            server.kill()
    assert server.returncode == 0, said
    assert "served 0 calls" not in said
    assert "servers" in output


def test_the_doctor_tries_a_pool(tmp_path: Path) -> None:
    command = words_of(
        "hf-distca run --servers 1 torchrun --nproc_per_node 3 -m hf_distca.tools.cli doctor"
    )
    output = run_program(command, tmp_path, timeout=200)
    assert "3 ranks on 1 node, 3 on each, 1 of them servers" in output
