"""docs/settings.md names the kernel that each family gets on a GPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fake_cuda import CUDA
from hf_distca import kernels
from hf_distca.errors import ConfigError
from hf_distca.integration import families, layer_kinds
from hf_distca.kernels import KernelRequest, ScoreOptions, flash, select_kernel

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"
FAMILIES = [name for group in families.PROVEN_GROUPS for name in families._TABLE[group]]


def list_requests(name: str) -> list[KernelRequest]:
    """List the kernel requests of a family's layers in bfloat16, by its default config."""
    config = CONFIG_MAPPING[name]()
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    try:
        shapes = {key.shape for key in layer_kinds.list_layer_keys(config, torch.bfloat16, "cuda")}
    except ConfigError:  # bamba and granitemoehybrid have no attention layers by default
        return []
    return [
        KernelRequest(
            CUDA,
            torch.bfloat16,
            shape.head_dim,
            shape.value_head_dim,
            ScoreOptions(1.0, softcap=softcap),
        )
        for shape in sorted(shapes, key=repr)
    ]


def group_families(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[int, int, int] | None
) -> dict[tuple[str, ...], set[str]]:
    """Group families by the kernels of their layers, with this version of flash-attn."""
    monkeypatch.setattr(flash, "_find_version", lambda: installed)
    found = defaultdict(set)
    for name in FAMILIES:
        if wanted := list_requests(name):
            found[tuple(sorted({select_kernel("auto", case).name for case in wanted}))].add(name)
    return dict(found)


def read_table() -> list[tuple[str, ...]]:
    """Read the cells of the page's table of families."""
    lines = PAGE.read_text().split("| families | ")[1].splitlines()[2:]
    rows = lines[: next(place for place, line in enumerate(lines) if not line.startswith("|"))]
    return [
        tuple(cell.strip().replace("`", "").replace('"', "") for cell in row.strip("|").split("|"))
        for row in rows
    ]


def test_settings_page_names_the_gpu_kernel_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "mismatch_reason", lambda kernel, case: None)
    monkeypatch.setattr(kernels, "_select_once", kernels._select_once.__wrapped__)
    alone, with_package = group_families(monkeypatch, None), group_families(monkeypatch, (2, 8, 3))
    for kernel_names, column in ((alone, 2), (with_package, 3)):
        named: set[str] = set()
        for row in read_table()[:-1]:
            members = set(row[0].split(", "))
            assert members <= kernel_names[tuple(row[column].split(" and "))], (row, kernel_names)
            named |= members
        rest = {key: members - named for key, members in kernel_names.items() if members - named}
        assert set(rest) == {(read_table()[-1][column],)}, rest
