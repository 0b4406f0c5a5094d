from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Trainer

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from pages import ROOT
from tiny_runs import tiny_llama


def list_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), re.DOTALL)


def test_every_code_block_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra 'examples'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    # The default waits 5 s for every stream that is not read to its end.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.1)
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 50, length) for length in (700, 40, 3, 90, 300, 12)]
    datasets.Dataset.from_dict({"tokens": documents}).to_parquet("documents.parquet")
    datasets.Dataset.from_dict(
        {"input_ids": [[3, 4, 5]] * 4, "seq_lengths": [[3], [1, 2]] * 2}
    ).to_parquet("rows.parquet")
    np.concatenate(documents).astype(np.uint16).tofile("tokens.bin")
    np.save("ends.npy", np.cumsum([len(document) for document in documents]))
    names: dict[str, Any] = {"model": tiny_llama("distca")}
    shares = []
    for block in list_blocks():
        exec(compile(block, "docs/data.md", "exec"), names)
        shares.append(names["shares"])
    parquet, stream, file, *_ = shares
    assert len(parquet) == len(file) == -(-sum(map(len, documents)) // 256)
    # Parquet and the token file hold the same documents in the same order.
    assert [share["input_ids"].tolist() for share in parquet] == [
        share["input_ids"].tolist() for share in file
    ]
    tokens = np.concatenate([share["input_ids"] for share in stream])
    assert len(tokens) == sum(map(len, documents)) // 256 * 256  # the rest is dropped
    assert set(tokens.tolist()) <= set(np.concatenate(documents).tolist())
    args, collator = names["args"], hf_distca.PackingCollator()
    args.dataloader_pin_memory = False  # there is no GPU
    Trainer(model=names["model"], args=args, train_dataset=stream, data_collator=collator).train()
    assert names["batch"]["distca_documents"] == PackedDocuments([700, 40])
