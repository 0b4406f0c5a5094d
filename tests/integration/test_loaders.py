"""Loaders and Trainers over shares: a wrong setup is refused by name before the first step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from peft import PromptTuningConfig, get_peft_model
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SequentialSampler,
    Subset,
)
from transformers import (
    AutoModelForCausalLM,
    JambaConfig,
    Trainer,
    TrainingArguments,
    WhisperConfig,
)

import hf_distca
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.checks.share_readers import check_loader
from hf_distca.integration.current_session import current_session
from tiny_runs import (
    COMMON,
    PAIRS,
    SIZES,
    documents,
    make_trainer,
    rows,
    settings,
    share_documents,
    tiny_llama,
)

TOKENS = 64
collate = hf_distca.PackingCollator()


def shares(
    ranks: int | None = 2, *, length: int = 8, group_size: int | None = None, seed: int | None = 0
) -> Any:
    """Make `length` global batches, some with a document longer than a rank's tokens."""
    lengths, config = [100, 20, 8, 64, 50, 14] * length, settings(group_size=group_size)
    how = {"config": config, "seed": seed, "fill": "cut"}
    return share_documents(lengths, TOKENS * (ranks or 1), ranks, **how)


def prepare(
    dataset: Any, *, processes: int = 2, split: bool = False, even: bool = True, **changes: Any
) -> Any:
    """Prepare a loader with accelerate, for the first of several processes."""
    loader = DataLoader(dataset, collate_fn=collate, **changes)
    return prepare_data_loader(
        loader,
        num_processes=processes,
        process_index=0,
        split_batches=split,
        even_batches=even,
        dispatch_batches=False,
    )


class Stream(torch.utils.data.IterableDataset):
    """Documents in a data set without a length."""

    def __iter__(self) -> Any:
        yield from ({"input_ids": one} for one in documents(100, 20, 8, 64, 50, 14))


def stream(rank: int | None = None, *, group_size: int | None = None) -> Any:
    config = settings(group_size=group_size)
    made = hf_distca.document_shares(
        Stream(), TOKENS, shapes=[(PAIRS.shape, None)], ranks=2, device="cpu", config=config
    )
    made.rank = rank
    return made


class Odd(Dataset):
    """An odd number of shares: all except the last, in the order of each epoch."""

    def __init__(self) -> None:
        self.dataset = shares()

    def set_epoch(self, epoch: int) -> None:
        self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset) - 1

    def __getitem__(self, item: int) -> Any:
        return self.dataset[item]


GOOD: dict[str, Callable[[], Any]] = {
    "prepared": lambda: prepare(shares()),
    "resumed": lambda: skip_first_batches(prepare(shares()), 2),
    "dropping the last": lambda: prepare(Odd(), drop_last=True),
    "one process": lambda: DataLoader(shares(1), collate_fn=collate),
    "DistributedSampler": lambda: DataLoader(
        data := shares(), collate_fn=collate, sampler=DistributedSampler(data, 2, 0, shuffle=False)
    ),
    "batch sampler": lambda: DataLoader(
        data := shares(1),
        collate_fn=collate,
        batch_sampler=BatchSampler(SequentialSampler(data), 1, False),
    ),
    "two groups": lambda: prepare(shares(None, group_size=2), processes=4),
    "stream": lambda: prepare(stream()),
    "stream, two groups": lambda: prepare(stream(group_size=2), processes=4),
    "stream of one rank": lambda: DataLoader(stream(0), collate_fn=collate),
    "part of shares in the order as given": lambda: prepare(shares(seed=None).select(range(4))),
    "no shares": lambda: prepare(rows(3), shuffle=True, batch_size=2),
}


@pytest.mark.parametrize("name", GOOD)
def test_loader_that_gives_each_rank_its_own_shares_passes_the_check(name: str) -> None:
    check_loader(GOOD[name](), model=tiny_llama("distca"), args=TrainingArguments(**COMMON))


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffled": (
        lambda: prepare(shares(), shuffle=True),
        r"RandomSampler .*sampling_strategy=\"sequential\"",
    ),
    "shuffled for one rank": (
        lambda: prepare(shares(1), processes=1, shuffle=True),
        r"RandomSampler .*sequential",
    ),
    "shuffled by DistributedSampler": (
        lambda: DataLoader(
            data := shares(), collate_fn=collate, sampler=DistributedSampler(data, 2, 0)
        ),
        r"DistributedSampler .*shuffle=False",
    ),
    "own batches": (
        lambda: DataLoader(shares(1), collate_fn=collate, batch_sampler=[[1], [0]]),
        "list reads them in its own order",
    ),
    "out of order": (
        lambda: prepare(shares(), num_workers=1, in_order=False),
        "dataloader_in_order=True",
    ),
    "split": (
        lambda: prepare(shares(), split=True, batch_size=2),
        "split_batches=True cuts batches of 2",
    ),
    "two a batch": (
        lambda: prepare(shares(), batch_size=2),
        "batches of 2.*per_device_train_batch_size=1",
    ),
    "three processes": (
        lambda: prepare(shares(), processes=3),
        "shares for 2 ranks, and 3 processes read them",
    ),
    "two groups, other size": (
        lambda: prepare(shares(group_size=4), processes=4),
        "shares for 2 ranks, and 4 processes read",
    ),
    "groups, three processes": (
        lambda: prepare(shares(group_size=2), processes=3),
        "shares for 2 ranks, and 3 processes",
    ),
    "groups, not prepared": (
        lambda: DataLoader(shares(group_size=2), collate_fn=collate),
        "2 ranks, and 1 process reads them",
    ),
    "not prepared": (
        lambda: DataLoader(shares(), collate_fn=collate),
        "shares for 2 ranks, and 1 process reads them",
    ),
    "ragged end": (lambda: prepare(Odd()), "31 of them for 2 processes.*dataloader_drop_last=True"),
    "ragged end, uneven": (
        lambda: prepare(Odd(), even=False),
        "31 of them for 2 processes.*dataloader_drop_last=True",
    ),
    "selected": (
        lambda: prepare(shares().select(range(4))),
        "a Dataset around them does not pass set_epoch on",
    ),
    "concatenated": (
        lambda: prepare(datasets.concatenate_datasets([shares()] * 2)),
        "a Dataset around them does not pass",
    ),
    "subset": (
        lambda: prepare(Subset(shares(), range(4))),
        "a Subset around them does not pass set_epoch on",
    ),
    "stream, split": (lambda: prepare(stream(), split=True, batch_size=2), "split_batches=True"),
    "stream, two a batch": (lambda: prepare(stream(), batch_size=2), "batches of 2"),
    "stream, three processes": (lambda: prepare(stream(), processes=3), "3 processes read them"),
    "stream, groups, three processes": (
        lambda: prepare(stream(group_size=2), processes=3),
        "3 processes read them",
    ),
    "stream, not prepared": (
        lambda: DataLoader(stream(), collate_fn=collate),
        "1 process reads them",
    ),
    "stream of one rank, prepared": (lambda: prepare(stream(0)), "2 processes read them"),
}


@pytest.mark.parametrize("name", BAD)
def test_loader_that_gives_a_rank_wrong_shares_is_refused(name: str) -> None:
    make, named = BAD[name]
    with pytest.raises(hf_distca.UnsupportedError, match=named):
        check_loader(make())


def build_trainer(*, eval_dataset: Any = None, **changes: Any) -> Trainer:
    """Make a Trainer over shares for one rank."""
    arguments = {"max_steps": 1, "train_sampling_strategy": "sequential", **changes}
    return make_trainer("distca", shares(1), eval_dataset=eval_dataset, **arguments)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"train_sampling_strategy": "random"}, "RandomSampler .*train_sampling_strategy"),
        (
            {"train_sampling_strategy": "batch_rebalance"},
            "BatchRebalanceSampler .*train_sampling_strategy",
        ),
        ({"per_device_train_batch_size": 2}, "batches of 2"),
        ({"dataloader_num_workers": 1, "dataloader_in_order": False}, "dataloader_in_order=True"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_loader_is_refused_before_training(changes: dict[str, Any], named: str) -> None:
    trainer = build_trainer(**changes)
    with pytest.raises(hf_distca.UnsupportedError, match=named):
        trainer.train()
    assert trainer.state.global_step == 0


def test_evaluation_loader_that_is_not_in_order_is_refused() -> None:
    trainer = build_trainer(
        eval_dataset=shares(1), dataloader_num_workers=1, dataloader_in_order=False
    )
    with pytest.raises(hf_distca.UnsupportedError, match="dataloader_in_order=True"):
        trainer.evaluate()


def test_error_names_the_columns_of_shares_that_the_trainer_drops() -> None:
    """The Trainer drops columns of a torch data set, but not computed columns of a
    `datasets.Dataset`.
    """
    trainer = build_trainer(remove_unused_columns=True)
    trainer.train()
    trainer.train_dataset = find_shares(shares(1))
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"drops distca_documents, shift_labels .*remove_unused_columns=False",
    ):
        trainer.train()


def test_trainer_without_shares_may_smooth_labels_and_batch_rows() -> None:
    trainer = make_trainer(
        "distca", rows(2), max_steps=1, label_smoothing_factor=0.1, per_device_train_batch_size=2
    )
    assert trainer.train().training_loss > 0


def test_shares_on_two_ranks_need_the_number_of_targets_of_all_ranks() -> None:
    args = TrainingArguments(**COMMON, average_tokens_across_devices=False)
    with pytest.raises(hf_distca.UnsupportedError, match="average_tokens_across_devices=True"):
        check_loader(prepare(shares()), args=args)
    check_loader(prepare(shares(1), processes=1), args=args)
    trainer = build_trainer()
    check_loader(prepare(shares()), trainer=trainer)
    trainer.model_accepts_loss_kwargs = False
    with pytest.raises(
        hf_distca.UnsupportedError, match=r"LlamaForCausalLM is a mean .*accepts_loss_kwargs = True"
    ):
        check_loader(prepare(shares()), trainer=trainer)


def test_evaluation_of_shares_needs_balance_evaluation() -> None:
    hf_distca.configure(settings())
    with pytest.raises(hf_distca.UnsupportedError, match="balance_evaluation=True"):
        check_loader(prepare(shares()), evaluation=current_session().config)
    hf_distca.configure(settings(balance_evaluation=True))
    check_loader(prepare(shares()), evaluation=current_session().config)
    assert current_session().config.balance_evaluation


def build_jamba() -> torch.nn.Module:
    config = JambaConfig(attn_layer_period=2, attn_layer_offset=1, num_experts=2, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation="distca")


def build_whisper() -> torch.nn.Module:
    config = WhisperConfig(
        vocab_size=61,
        d_model=32,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="distca")


def build_prompted() -> torch.nn.Module:
    with warnings.catch_warnings():
        # Peft uses a deprecated name of the model.
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(
            tiny_llama("distca"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
        )


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (
            lambda: tiny_llama("sdpa"),
            'no part of LlamaForCausalLM has attn_implementation="distca"',
        ),
        (build_jamba, "jamba models need whole documents: their recurrent layers carry state"),
        (build_whisper, "whisper models need whole documents: their loss reads only `labels`"),
        (build_prompted, "PROMPT_TUNING puts virtual tokens"),
    ],
    ids=["sdpa", "jamba", "whisper", "prompt tuning"],
)
def test_models_that_need_whole_documents_are_refused_on_two_ranks(
    make: Callable[[], torch.nn.Module], named: str
) -> None:
    model = make()
    with pytest.raises(hf_distca.UnsupportedError, match=named):
        check_loader(prepare(shares()), model=model)
    if make is not build_prompted:  # virtual tokens need one document a row
        check_loader(prepare(shares(1), processes=1), model=model)


def test_selected_shares_may_be_evaluated() -> None:
    hf_distca.configure(settings(balance_evaluation=True))
    check_loader(prepare(shares().select(range(4))), evaluation=current_session().config)
