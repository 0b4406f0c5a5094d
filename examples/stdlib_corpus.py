"""A long-tailed corpus, a tokenizer and a small model that need no download.

The documents are the source files of Python's standard library. As in other corpora of long
documents, the median document has a few thousand tokens, and the longest a hundred times as many.
Order and content depend only on the version of Python.
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
# Third-party packages differ between installations, and some distributions of Python lack the test
# folders.
EXCLUDED_FOLDERS = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def source_files(root: Path) -> list[Path]:
    """List the non-empty Python files of the standard library below `root`, sorted by path."""
    files = (
        path
        for path in root.rglob("*.py")
        if EXCLUDED_FOLDERS.isdisjoint(path.relative_to(root).parts)
    )
    return sorted(path for path in files if path.stat().st_size)


def read_documents(root: str, version: str) -> Iterator[dict[str, str]]:
    """Yield one document per source file.

    `datasets` has a separate cache for each `version`, because the version is an argument.
    """
    for path in source_files(Path(root)):
        source = f"Python {version}, {path.relative_to(root)}"
        yield {"source": source, "text": path.read_text(encoding="utf-8", errors="replace")}


def load_corpus() -> Dataset:
    """Load this Python's standard library as a dataset with the columns `source` and `text`."""
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
    """Train a byte-level BPE tokenizer. Its alphabet is all bytes, so no token is unknown."""
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
    """Write an untrained Llama model and its tokenizer to `folder`, for `from_pretrained`.

    The model is so small that one CPU core takes seconds for a step on 16384 tokens. It is so
    narrow that attention takes most of this time, as in large models with long documents.
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
