"""A long-tailed corpus, a tokenizer and a small model that need no download.

The documents are the source files of Python's own standard library: real text, a few thousand
tokens at the median and a hundred times that at the top, as long-document corpora are. Order and
content depend on the interpreter's version only.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

END_OF_DOCUMENT = "<|endoftext|>"
# Third-party packages differ between installations; test folders are left out of some distributions
# of Python.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def source_files(root: Path) -> list[Path]:
    """Every non-empty Python file of the standard library below `root`, ordered by path."""
    files = (
        path
        for path in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    return sorted(path for path in files if path.stat().st_size)


def read_documents(root: str, version: str) -> Iterator[dict[str, str]]:
    """One document per source file. The version is part of what `datasets` caches the result
    under.
    """
    for path in source_files(Path(root)):
        source = f"Python {version}, {path.relative_to(root)}"
        yield {"source": source, "text": path.read_text(encoding="utf-8", errors="replace")}


def load_corpus() -> Dataset:
    """The running interpreter's standard library as a dataset with the columns `source` and
    `text`.
    """
    root = sysconfig.get_path("stdlib")
    if not source_files(Path(root)):
        raise FileNotFoundError(
            f"no Python source files in {root}: this interpreter has no standard library; use"
            " --train_file."
        )
    return Dataset.from_generator(
        read_documents, gen_kwargs={"root": root, "version": platform.python_version()}
    )


def train_tokenizer(
    documents: Dataset, vocabulary: int, text_column: str = "text"
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: bytes are its alphabet, so no document has an unknown token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for batch in documents.iter(batch_size=64) for text in batch[text_column])
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END_OF_DOCUMENT, pad_token=END_OF_DOCUMENT
    )


def write_initial_model(
    folder: Path,
    documents: Dataset,
    *,
    max_length: int,
    seed: int,
    text_column: str = "text",
    vocabulary: int = 2048,
) -> None:
    """Write an untrained Llama-architecture model and its tokenizer to `folder`, as
    `from_pretrained` reads them.

    Small enough that one CPU core takes seconds for a step on 16384 tokens, narrow enough that
    attention takes most of them, as it does in large models once documents are long.
    """
    tokenizer = train_tokenizer(documents, vocabulary, text_column)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=max_length,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    set_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
