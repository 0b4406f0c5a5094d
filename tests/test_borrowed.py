"""Private names of torch, transformers and accelerate: they are all in one file, and its statements
about them are true.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

from hf_distca import borrowed
from hf_distca.data import borrowed_readers

SOURCE = Path(borrowed.__file__).parent
OTHERS = sorted(path for path in SOURCE.rglob("*.py") if not path.name.startswith("borrowed"))
PACKAGES = ("torch", "dist", "transformers", "accelerate")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_private_names_of_other_packages_are_only_in_borrowed() -> None:
    texts = {path.relative_to(SOURCE): path.read_text(encoding="utf-8") for path in OTHERS}
    for path, text in texts.items():
        assert "SLF001" not in text, f"{path} asks ruff to overlook a private member"
        private = list_private_names(text)
        assert not private, f"{path} has {private}: take it from hf_distca.borrowed"


def list_private_names(text: str) -> list[str]:
    """List the private names of other packages in a source."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        paths = [name.split(".") for name in names]
        found += [
            part for path in paths if path[0] in PACKAGES for part in path if is_private(part)
        ]
    return found


def test_every_public_name_of_borrowed_exists() -> None:
    assert [name for name in borrowed.__all__ if not hasattr(borrowed, name)] == []


def test_is_in_backward_is_true_only_in_backward() -> None:
    seen = []

    class Identity(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            seen.append(borrowed.is_in_backward())
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            seen.append(borrowed.is_in_backward())
            return grad

    Identity.apply(torch.ones(1, requires_grad=True)).sum().backward()
    assert seen == [False, True]


def test_version_of_a_tensor_grows_with_changes_in_place() -> None:
    tensor = torch.zeros(3)
    before = borrowed.get_version(tensor)
    tensor[1:].add_(1)
    assert borrowed.get_version(tensor) > before


def test_named_parts_of_masks_exist_in_transformers() -> None:
    there = {name for name, value in vars(masking_utils).items() if inspect.isfunction(value)}
    # The newest versions have all parts. The oldest lack these two.
    assert borrowed.CAUSAL_MASK_PARTS | {borrowed.MASK_UNION, borrowed.MASK_BLOCKS} <= there | {
        "remap_positions_for_packed_sequence",
        borrowed.MASK_BLOCKS,
    }


def test_new_model_calls_the_method_that_checks_attention_names() -> None:
    """`let_names_pass` replaces this method."""
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8
    )
    asked = []
    ask = LlamaForCausalLM._check_and_adjust_attn_implementation

    class Asking(LlamaForCausalLM):
        def _check_and_adjust_attn_implementation(self, *args: object, **kwargs: object) -> str:
            asked.append(args[0])
            return ask(self, *args, **kwargs)

    Asking._from_config(config, attn_implementation="sdpa")
    assert "sdpa" in asked
    assert borrowed.get_changed_flash_attention() is None


class FakeWorld:
    """A world in which this process is rank 1."""

    bound_device_id = None

    def rank(self) -> int:
        return 1


class FakeNccl:
    """The class that a torch without CUDA lacks."""

    class Options:
        is_high_priority_stream = False
        _timeout = None


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_nccl_group_for_messages_has_a_high_priority_stream(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}
    world = FakeWorld()

    def make(*arguments: object, **options: object) -> tuple[str, None]:
        seen.update(options)
        return "group", None

    monkeypatch.setattr(borrowed.c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(borrowed.c10d, "_get_default_group", lambda: world)
    monkeypatch.setattr(borrowed.c10d, "_new_process_group_helper", make)
    monkeypatch.setattr(borrowed.c10d, "_get_default_store", lambda: None)
    monkeypatch.setattr(borrowed.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    assert (
        borrowed.group_of_members((0, 1), backend, timedelta(seconds=9), "a name", "a purpose")
        == "group"
    )
    options = seen["backend_options"]
    if backend == "gloo":
        assert options is None
    else:
        assert (options.is_high_priority_stream, options._timeout) == (True, timedelta(seconds=9))


def test_batch_size_of_an_existing_trainer_can_be_changed(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    args = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, use_cpu=True, report_to=[]
    )
    trainer = Trainer(model, args, train_dataset=[{"input_ids": [1, 2]}] * 8)
    borrowed.set_batch_size(trainer, 1)
    assert len(trainer.get_train_dataloader()) == 8


@pytest.mark.parametrize(("installed", "targets"), [("5.10.2", 5), ("5.11.0", 2)])
def test_older_trainers_count_the_targets_of_shares(
    monkeypatch: pytest.MonkeyPatch, installed: str, targets: int
) -> None:
    from transformers import Trainer

    def count(trainer: object, batches: list[dict[str, torch.Tensor]], device: str) -> int:
        return sum(int((batch["labels"] != -100).sum()) for batch in batches)

    monkeypatch.setattr(Trainer, "_get_num_items_in_batch", count)
    monkeypatch.setattr(borrowed, "version", lambda _: installed)
    borrowed.count_shifted_targets.__wrapped__()  # without its cache
    share = {"labels": torch.full((1, 4), -100), "shift_labels": torch.tensor([[5, 6, -100, 7]])}
    whole = {"labels": torch.tensor([[-100, 2, 3, -100]])}
    assert (
        Trainer._get_num_items_in_batch(Trainer.__new__(Trainer), [share, whole], "cpu") == targets
    )


def test_is_of_package_is_true_only_for_functions_of_packages() -> None:
    hub_kernels = pytest.importorskip("transformers.integrations.hub_kernels")
    if not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"):
        return  # before 5.16
    package = ModuleType("a_package")
    package.scan = lambda states: states  # type: ignore[attr-defined]

    def decorated(name: str) -> Any:
        def scan(states: Any) -> Any:
            return states

        return hub_kernels.use_kernel_func_from_hub_with_fallback("scan", name)(scan)

    with patch.dict(sys.modules, {"a_package": package}):
        found, missing = decorated("a_package"), decorated("no_package")

    def as_module(func: Any) -> torch.nn.Module:
        """Wrap a function in a module, as `kernels` does."""

        class Func(torch.nn.Module):
            def forward(self, *args: Any) -> Any:
                return func(*args)

        return Func()

    assert all(borrowed.is_of_package(one) for one in (found, as_module(found)))
    assert not any(borrowed.is_of_package(one) for one in (missing, as_module(missing), as_module))


def test_worker_info_can_be_hidden_and_split_streams_are_counted() -> None:
    from datasets import Dataset
    from datasets.distributed import split_dataset_by_node
    from torch.utils.data import DataLoader, IterableDataset, get_worker_info

    class Workers(IterableDataset[bool]):
        def __iter__(self) -> Iterator[bool]:
            for _ in range(2):
                yield get_worker_info() is None
                with borrowed_readers.hide_worker_info():
                    hidden = get_worker_info() is None
                yield hidden

    assert list(DataLoader(Workers(), batch_size=None, num_workers=1)) == [False, True, False, True]
    data = Dataset.from_dict({"x": [1, 2, 3, 4]})
    assert borrowed_readers.get_row_indices(data) is None
    assert borrowed_readers.get_row_indices(data.select([2, 0])).column(0).to_pylist() == [2, 0]
    stream = data.to_iterable_dataset(2)
    assert borrowed_readers.count_split_ranks(stream) == 1
    assert (
        borrowed_readers.count_split_ranks(split_dataset_by_node(stream, 0, 2).shuffle(seed=0)) == 2
    )


def test_is_profiling_is_true_only_while_a_profiler_records() -> None:
    assert not borrowed.is_profiling()
    with torch.profiler.profile():
        assert borrowed.is_profiling()
    assert not borrowed.is_profiling()
