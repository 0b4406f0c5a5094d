"""Warnings about packed documents that a model separates only in attention."""

from __future__ import annotations

import itertools
import logging
import re

import pytest
import torch
from compare import alone, difference, documents, forward, packed, quiet
from tiny import build

import hf_distca
from hf_distca.integration.processes import warn_once

CARRYING = "layers .* carry state from one document to the next"
UNPOSITIONED = "take no position ids: .* positions count on"


def list_warnings(
    model_type: str,
    lengths: tuple[int, ...],
    caplog: pytest.LogCaptureFixture,
    padding_rows: int = 0,
) -> list[str]:
    """List the warnings of two forwards of a packed row, with rows of padding after it."""
    hf_distca.configure()
    warn_once.cache_clear()
    with quiet():
        model = build(model_type, "distca", torch.float32)
    logging.getLogger("hf_distca").setLevel(logging.NOTSET)
    rows = 1 + padding_rows
    ids, positions = torch.cat(documents(lengths)), torch.cat([torch.arange(n) for n in lengths])
    mask = (torch.arange(rows) == 0).long()[:, None].expand(rows, len(ids))
    with caplog.at_level(logging.WARNING, "hf_distca"):
        for _ in range(2):
            forward(model, ids.expand(rows, -1), positions.expand(rows, -1), attention_mask=mask)
    return [record.getMessage() for record in caplog.records if record.name == "hf_distca"]


@pytest.mark.parametrize(
    ("model_type", "said"), [("jamba", CARRYING), ("zamba", CARRYING), ("bart", UNPOSITIONED)]
)
def test_leaks_between_packed_documents_are_logged_once(
    model_type: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    messages = list_warnings(model_type, (9, 5), caplog)
    assert len(messages) == 1
    assert f"{model_type} models" in messages[0]
    assert re.search(said, messages[0])


def test_rows_of_padding_do_not_hide_packed_documents(caplog: pytest.LogCaptureFixture) -> None:
    """The batch has as many documents as rows, but one row has two documents."""
    assert len(list_warnings("jamba", (9, 5), caplog, padding_rows=1)) == 1


@pytest.mark.parametrize(
    ("model_type", "lengths"),
    [("jamba", (14,)), ("bart", (14,)), ("llama", (9, 5)), ("qwen3_next", (9, 5))],
)
def test_documents_that_do_not_leak_cause_no_warning(
    model_type: str, lengths: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert list_warnings(model_type, lengths, caplog) == []


@pytest.mark.parametrize("implementation", ["sdpa", "distca"])
def test_llama_4_scales_queries_by_position_in_the_row(implementation: str) -> None:
    """Scaling begins after `floor_scale` tokens of a row, under any attention."""
    lengths, found = (9, 5), {}
    for scale in (4, 15):
        with quiet():
            models = [build("llama4_text", implementation, torch.float64) for _ in range(2)]
        for part in itertools.chain(*(model.modules() for model in models)):
            if hasattr(part, "floor_scale"):
                part.floor_scale, part.use_rope = scale, False
        together = packed(models[0], documents(lengths))
        found[scale], _ = difference(together, alone(models[1], documents(lengths)))
    assert found[4] > 1e-3
    assert found[15] < 1e-5
