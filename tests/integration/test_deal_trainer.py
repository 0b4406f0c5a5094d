"""`hf_distca.deal` on a Trainer, compared with one process under transformers' own attention."""

from __future__ import annotations

import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stderr
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset, IterableDataset, disable_progress_bars
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    Trainer,
    modeling_utils,
)

import hf_distca
from checkpointed import ARGUMENT
from hf_distca.integration import processes
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import (
    COMMON,
    documents,
    exact_arguments,
    losses,
    make_tokenizer,
    settings,
    text_of,
    tiny_llama,
)
from turns import in_turn

LENGTHS = (200, 7, 1, 33, 90, 64, 12, 150, 5, 80)
TOKENS = 96  # in a global batch, on any number of ranks; two documents are longer
STEPS = 6


class Subclass(Trainer):
    pass


def rows(**columns: Any) -> Dataset:
    return Dataset.from_dict({"input_ids": documents(*LENGTHS), **columns})


def masks() -> list[list[int]]:
    """Make masks in which the second half of each document is a target."""
    return [[0] * (length // 2) + [1] * (length - length // 2) for length in LENGTHS]


def make_packed_rows() -> Dataset:
    """Make rows of two documents each, with the documents of `rows`."""
    ids = documents(*LENGTHS)
    pairs = [(number, number + 1) for number in range(0, len(ids), 2)]
    return Dataset.from_dict(
        {
            "input_ids": [ids[first] + ids[second] for first, second in pairs],
            "seq_lengths": [[LENGTHS[first], LENGTHS[second]] for first, second in pairs],
            "completion_mask": [masks()[first] + masks()[second] for first, second in pairs],
        }
    )


def insert_empty_documents() -> Dataset:
    ids = documents(*LENGTHS)
    return Dataset.from_dict({"input_ids": [[], *ids[:5], [], *ids[5:], []]})


def stream() -> IterableDataset:
    return rows().to_iterable_dataset()


OFFLOADED = "offloaded checkpoints"
OFFLOADING = {ARGUMENT: True, f"{ARGUMENT}_kwargs": {"offload": True, "use_reentrant": False}}
# By case: the class and data of a Trainer, changes of its arguments, and arguments of `deal`.
CASES: dict[str, tuple[type[Trainer], Callable[[], Any], dict[str, Any], dict[str, Any]]] = {
    "plain": (Trainer, rows, {"seed": 3}, {}),
    "larger batches before": (
        Trainer,
        rows,
        {"per_device_train_batch_size": 8, "data_seed": 5},
        {},
    ),
    "targets of masks": (Trainer, lambda: rows(completion_mask=masks()), {}, {}),
    "packed rows": (Trainer, make_packed_rows, {}, {}),
    "subclass, accumulation, whole documents": (
        Subclass,
        rows,
        {"gradient_accumulation_steps": 2},
        {"fill": "whole"},
    ),
    "stream": (Trainer, stream, {"max_steps": 3}, {}),
    "evaluation": (
        Trainer,
        rows,
        {"eval_strategy": "steps", "eval_steps": 2},
        {"evaluation": True},
    ),
    "empty documents": (Trainer, insert_empty_documents, {"max_steps": 2}, {}),
    OFFLOADED: (Trainer, rows, OFFLOADING, {}),
}
ALWAYS = ["subclass, accumulation, whole documents", "empty documents", OFFLOADED]


@contextmanager
def offload_unpinned(expected: bool) -> Iterator[None]:
    """Offload checkpoints to memory that is not pinned, because pinning needs an accelerator.

    Fail if nothing is offloaded although it is expected.
    """
    if not expected:
        yield
        return
    switched_on = 0

    def save_on_cpu(pin_memory: bool, device_type: str) -> AbstractContextManager[None]:
        nonlocal switched_on
        switched_on += 1
        return torch.autograd.graph.save_on_cpu(pin_memory=False, device_type=device_type)

    with patch.object(modeling_utils, "save_on_cpu", save_on_cpu):
        yield
    assert switched_on, "no checkpoint was offloaded"


def skip_before_offloading(name: str) -> None:
    if name == OFFLOADED and not hasattr(modeling_utils, "save_on_cpu"):
        pytest.skip("this release of transformers does not offload checkpoints")


def make(
    data: Any, kind: type[Trainer] = Trainer, attention: str = "distca", **how: Any
) -> Trainer:
    disable_progress_bars()
    # With AdamW's usual epsilon, rounding of tiny gradients grows to 2e-5 of later norms, more on
    # some processors than on others.
    rates = {"learning_rate": 1e-2, "adam_epsilon": 1e-2}
    arguments = exact_arguments(**{"max_steps": STEPS, **rates, **how})
    return kind(tiny_llama(attention), arguments, train_dataset=data, eval_dataset=rows())


def train(rank: int, ranks: int, implementation: str, name: str) -> list[float]:
    hf_distca.configure(settings(cost_model="analytic"))
    kind, data, changes, told = CASES[name]
    trainer = make(data(), kind, implementation, **changes)
    assert hf_distca.deal(trainer, TOKENS // ranks, **told) is trainer
    with offload_unpinned(name == OFFLOADED):
        trainer.train()
    return losses(trainer)


@cache
def train_alone(name: str) -> list[float]:
    return train(0, 1, "sdpa", name)


@pytest.mark.parametrize("name", in_turn(CASES, 16, ALWAYS))
def test_dealt_trainer_on_two_ranks_trains_as_one_process(rank_pool: RankPools, name: str) -> None:
    skip_before_offloading(name)
    expected = train_alone(name)
    assert len(expected) >= 2 * min(STEPS, CASES[name][2].get("max_steps", STEPS))
    assert rank_pool(2)(train, 2, "distca", name)[0] == pytest.approx(expected, rel=1e-5)


def log_dealt_training(rank: int, packed: bool) -> tuple[list[dict[str, float]], str]:
    hf_distca.configure(settings())
    trainer = make(make_packed_rows() if packed else rows(), max_steps=2)
    with redirect_stderr(StringIO()) as said:
        hf_distca.deal(trainer, TOKENS // 2).train()
    return trainer.state.log_history, said.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_logs_report_the_imbalance_of_documents_in_order(
    rank_pool: RankPools, packed: bool
) -> None:
    """Imbalance counts causal pairs, which dealing spreads more evenly over ranks."""
    logged, said = rank_pool(2)(log_dealt_training, packed)[0]
    for row in logged[:-1]:
        in_order = row["distca/imbalance_estimated_in_order"]
        assert in_order > 1.2 > row["distca/imbalance_estimated_before"]
    assert "estimated, documents in order" in said
    assert "with documents in their order, 1.0" in said
    before = re.search(r"estimated: (\S+) in the batches replaced,", said)
    assert before is not None
    summary = re.search(r"estimated, batches replaced +(\S+)", said)
    assert summary is not None
    assert float(summary[1]) == pytest.approx(float(before[1]), abs=0.006)
    assert float(before[1]) > 1.2


def test_completion_masks_choose_targets_in_single_and_packed_rows() -> None:
    assert train_alone("targets of masks") != pytest.approx(train_alone("plain"), rel=1e-3)
    assert train_alone("packed rows") == pytest.approx(train_alone("targets of masks"), rel=1e-6)


def test_deal_prints_documents_targets_and_batches(capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make(rows(), gradient_accumulation_steps=2)
    hf_distca.deal(trainer, TOKENS, fill="cut")
    said = capfd.readouterr().err
    for fact in (
        "10 documents of 642 tokens, the longest of 200, to 1 rank with 96 tokens each",
        "Targets: 632; 1 of the documents have none.",
        "6 global batches of 96 tokens, 2 in each optimizer step.",
        "Longer than a global batch, and therefore cut: 2.",
        "1.00 in the batches replaced, 1.00 with documents in their order, 1.00 dealt and moved.",
        "lose context by a cut: 45.8%",
        "Padding: 0.0%. Optimizer steps of an epoch: 5 before, 3 dealt.",
    ):
        assert fact in said
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds.count(hf_distca.DistCACallback) == 1
    with pytest.raises(hf_distca.ConfigError, match="dealt already"):
        hf_distca.deal(trainer, TOKENS)


def capture(capfd: pytest.CaptureFixture[str], data: Any, **changes: Any) -> str:
    hf_distca.deal(make(data, **changes), TOKENS)
    return capfd.readouterr().err


def test_deal_prints_how_many_tokens_are_targets(capfd: pytest.CaptureFixture[str]) -> None:
    assert "Targets: 322; 1 of the documents have none." in capture(
        capfd, rows(completion_mask=masks())
    )
    many = Dataset.from_dict(
        {"input_ids": [[1, 2, 3, 4]] * 600, "labels": [[-100, 2, 3, -100]] * 600}
    )
    assert "Targets: 50% of the tokens, in a sample of 256 documents.\n" in capture(capfd, many)


def test_deal_warns_if_no_sampled_document_has_a_target(caplog: pytest.LogCaptureFixture) -> None:
    """The sample is 256 of 600 documents; the only document with a target is not in the sample."""
    many = Dataset.from_dict(
        {"input_ids": [[1, 2]] * 600, "labels": [[-100, 2 if n == 1 else -100] for n in range(600)]}
    )
    hf_distca.deal(make(many), TOKENS)
    assert (
        "none of the 512 tokens of 256 documents is a target, in a sample of the 600 documents"
        in caplog.text
    )


def test_deal_prints_the_ranks_and_batches_of_a_stream(capfd: pytest.CaptureFixture[str]) -> None:
    lines = capture(capfd, stream(), gradient_accumulation_steps=2).splitlines()[-3:]
    assert lines[0] == (
        "distca deals a stream of documents to 1 rank with 96 tokens each, which has nobody to"
        " share with."
    )
    assert lines[1].startswith(
        "Global batches have 96 tokens, 2 in each optimizer step, and take documents as they come"
    )


def of_my_own(features: Any) -> Any:
    raise AssertionError("the collator was called")


class OfMyOwn(DataCollatorWithPadding):
    pass


def make_mlm_collator() -> Any:
    token = make_tokenizer()
    token.mask_token = "02"
    return DataCollatorForLanguageModeling(token)


# Collators, and the name in the refusal; None if `deal` replaces the collator silently.
COLLATORS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "a function": (lambda: of_my_own, "of_my_own"),
    "of arguments": (lambda: partial(of_my_own), "of_my_own"),
    "a subclass": (lambda: OfMyOwn(make_tokenizer()), "OfMyOwn"),
    "random masks": (make_mlm_collator, r"DataCollatorForLanguageModeling\(mlm=True\)"),
    "language modeling": (
        lambda: DataCollatorForLanguageModeling(make_tokenizer(), mlm=False),
        None,
    ),
    "flattening": (DataCollatorWithFlattening, None),
    "by default": (lambda: None, None),
    "packing": (hf_distca.PackingCollator, None),
}


@pytest.mark.parametrize("name", COLLATORS)
def test_unknown_data_collator_is_refused_unless_replace_is_given(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    collator, named = COLLATORS[name]
    trainers = [make(rows()) for _ in range(2)]
    for trainer in trainers:
        trainer.data_collator = collator() or trainer.data_collator
    processes.warn_once.cache_clear()
    if named is None:
        hf_distca.deal(trainers[0], TOKENS)
        assert "with PackingCollator" not in caplog.text
    else:
        with pytest.raises(
            hf_distca.UnsupportedError,
            match=rf'replaces the data_collator, but does not know {named}: .*collator="replace"',
        ):
            hf_distca.deal(trainers[0], TOKENS)
        hf_distca.deal(trainers[1], TOKENS, collator="replace").train()
        assert re.search(f"replaces {named} with PackingCollator.", caplog.text)


def test_deal_warns_if_the_pad_token_also_ends_documents(caplog: pytest.LogCaptureFixture) -> None:
    trainer, token = make(rows()), make_tokenizer()
    token.pad_token = token.eos_token
    trainer.data_collator = DataCollatorForLanguageModeling(token, mlm=False)
    processes.warn_once.cache_clear()
    hf_distca.deal(trainer, TOKENS)
    assert "does not train on token 1, which both pads and ends documents" in caplog.text


class OwnOrder(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return torch.utils.data.RandomSampler(self.train_dataset)


def test_sampling_strategy_is_replaced_but_custom_sampler_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    processes.warn_once.cache_clear()
    hf_distca.deal(make(rows(), train_sampling_strategy="group_by_length"), TOKENS)
    assert "hf_distca.deal replaces train_sampling_strategy='group_by_length'" in caplog.text
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"RandomSampler reads them in its own order.*leave out .*_get_train_sampler",
    ):
        hf_distca.deal(make(rows(), OwnOrder), TOKENS).train()


def test_sequential_sampling_keeps_the_order_of_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """Both Trainers have the same arguments, which the first call of `deal` has changed."""
    ordered = {"train_sampling_strategy": "sequential"}
    first = make(rows(), **ordered)
    second = Trainer(tiny_llama("distca"), first.args, train_dataset=rows())
    for trainer in (first, second):
        hf_distca.deal(trainer, TOKENS)
        assert "6 global batches of 96 tokens, in the order of rows." in capfd.readouterr().err
        read = [share["input_ids"] for share in trainer.train_dataset]
        ids = torch.cat([torch.tensor(some) for some in documents(*LENGTHS)])
        batches = zip(torch.cat(read).split(TOKENS), ids.split(TOKENS), strict=False)
        assert all(batch.sort()[0].equal(in_order.sort()[0]) for batch, in_order in batches)
    shuffled = make(rows())
    again = Trainer(tiny_llama("distca"), shuffled.args, train_dataset=rows())
    for trainer in (shuffled, again):
        hf_distca.deal(trainer, TOKENS)
    assert "in the order of rows" not in capfd.readouterr().err


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        other = [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in self.mine]
        return self.accelerator.prepare(torch.utils.data.DataLoader(other))

    mine = documents(20, 20)


class DropsDocuments(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        del inputs["distca_documents"]
        return super().training_step(model, inputs, *args, **kwargs)


@pytest.mark.parametrize("kind", [OwnLoader, DropsDocuments])
def test_training_batches_that_were_not_dealt_are_refused(kind: type[Trainer]) -> None:
    trainer = make(rows(), kind)
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=f"train_dataset of this {kind.__name__} is dealt, but its batches are not",
    ):
        hf_distca.deal(trainer, TOKENS).train()
    assert not trainer.state.global_step


def test_predict_on_rows_that_are_not_dealt_warns(caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(rows(labels=documents(*LENGTHS)))
    hf_distca.deal(trainer, TOKENS, evaluation=True)
    processes.warn_once.cache_clear()
    trainer.evaluate()
    assert "rows that are not dealt" not in caplog.text
    trainer.predict(rows(labels=documents(*LENGTHS)))
    assert "reads rows that are not dealt, though eval_dataset is dealt" in caplog.text


def evaluate_and_train(rank: int, first: str) -> str:
    """Evaluate and train: transformers 5.23 then trains without DistributedDataParallel."""
    hf_distca.configure(settings())
    trainer = make(rows(), max_steps=1)
    hf_distca.deal(trainer, TOKENS // 2, evaluation=True)
    if first == "predict":
        trainer.predict(rows(labels=documents(*LENGTHS)))
    elif first:
        trainer.evaluate()
    try:
        trainer.train()
    except hf_distca.UnsupportedError as error:
        assert not trainer.state.global_step
        return str(error)
    wrapped = trainer.model_wrapped
    assert isinstance(wrapped, torch.nn.parallel.DistributedDataParallel)
    return "trained"


@pytest.mark.parametrize("first", ["evaluate", "predict", ""])
def test_shares_without_gradient_averaging_are_refused(rank_pool: RankPools, first: str) -> None:
    """A release of transformers that wraps the model in DistributedDataParallel may train."""
    for said in rank_pool(2)(evaluate_and_train, first):
        assert said == "trained" or (first and "nothing averages the gradients of 2 ranks" in said)


# By case: data for training and evaluation, arguments of `deal`, and the error.
REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, Any], str]] = {
    "no targets": (
        lambda: rows(labels=[[-100] * length for length in LENGTHS]),
        rows,
        {},
        "none of the 642 tokens of 10 documents is a target: labels are -100",
    ),
    "nothing to train on": (lambda: None, rows, {}, "train_dataset of this Trainer is None"),
    "nothing to evaluate": (rows, lambda: None, {}, "has no eval_dataset"),
    "evaluation is a stream": (rows, stream, {}, "the eval_dataset is a stream"),
    "one evaluation is a stream": (rows, lambda: {"a": rows(), "b": stream()}, {}, "is a stream"),
    "no room": (
        lambda: Dataset.from_dict({"input_ids": documents(48, 48, 48)}),
        lambda: Dataset.from_dict({"input_ids": [[1] * (TOKENS + 1)]}),
        {"longer": "refuse"},
        "1 of 1 documents are longer",
    ),
    "a word": (rows, rows, {"collator": "mine"}, "collator='mine' must be 'check' or 'replace'"),
    "nothing for tokens": (rows, rows, {"tokens_per_rank": None}, "None must be a whole number"),
    "text for tokens": (rows, rows, {"tokens_per_rank": "96"}, "'96' must be a whole number"),
    "half a token": (rows, rows, {"tokens_per_rank": 1.5}, "1.5 must be a whole number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_trainer_is_left_unchanged(name: str) -> None:
    hf_distca.configure(settings())
    data, evaluated, told, named = REFUSED[name]
    trainer = make(data(), per_device_eval_batch_size=4)
    trainer.eval_dataset = evaluated()

    def look() -> list[Any]:
        args = {**vars(trainer.args)}
        parts = [trainer.train_dataset, trainer.eval_dataset, trainer.data_collator]
        callbacks = list(trainer.callback_handler.callbacks)
        return [args, *map(id, parts), callbacks, current_session().config]

    before = look()
    with pytest.raises(hf_distca.DistCAError, match=named):
        hf_distca.deal(trainer, **{"tokens_per_rank": TOKENS, "evaluation": True, **told})
    assert look() == before


def test_deal_warns_of_recurrent_layers_under_sdpa(caplog: pytest.LogCaptureFixture) -> None:
    """Under sdpa, recurrent layers carry states from one document to the next."""
    for name, model_type, is_said in (
        ("sdpa", "qwen3_next", True),
        ("sdpa", "jamba", True),
        ("distca", "qwen3_next", False),
        ("sdpa", "llama", False),
    ):
        caplog.clear()
        processes.warn_once.cache_clear()
        trainer = make(rows(), attention=name)
        trainer.model.config.model_type = model_type
        hf_distca.deal(trainer, TOKENS)
        said = f"recurrent layers of this {model_type} model carry states from"
        assert (said in caplog.text) == is_said


def refuse(rank: int, changes: dict[str, Any]) -> str:
    trainer = make(rows(), **changes)
    trainer.compute_metrics = lambda prediction: {}
    with pytest.raises(hf_distca.UnsupportedError) as refused:
        hf_distca.deal(trainer, TOKENS // 2, evaluation=True)
    return str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"label_smoothing_factor": 0.1},
            "hf_distca.deal for 2 ranks, and label_smoothing_factor=0.1",
        ),
        ({"average_tokens_across_devices": False}, "Set average_tokens_across_devices=True"),
        ({}, 'label_names=["shift_labels"]'),
    ],
    ids=["smoothing", "average", "metrics"],
)
def test_settings_that_make_losses_of_shares_wrong_are_refused(
    rank_pool: RankPools, changes: dict[str, Any], message: str
) -> None:
    for refused in rank_pool(2)(refuse, changes):
        assert message in refused


def test_deal_with_evaluation_switches_balance_evaluation_on() -> None:
    """The settings of a callback that was added before stay in force."""
    trainer = make(rows())
    callback = hf_distca.DistCACallback(settings(tile=16))
    trainer.add_callback(callback)
    callback.on_init_end(trainer.args, trainer.state, trainer.control)
    hf_distca.deal(trainer, TOKENS, evaluation=True)
    assert current_session().config == settings(tile=16, balance_evaluation=True)


def test_each_named_eval_dataset_is_dealt() -> None:
    trainer = make(rows())
    trainer.eval_dataset = {"first": rows(), "second": rows(completion_mask=masks())}
    hf_distca.deal(trainer, TOKENS, evaluation=True)
    assert [name for name in trainer.evaluate() if name.endswith("_loss")] == [
        "eval_first_loss",
        "eval_second_loss",
    ]
    assert trainer.args.per_device_eval_batch_size == 1


def test_resumed_training_warns_if_its_global_batches_differ(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {
        "output_dir": str(tmp_path),
        "save_strategy": "steps",
        "save_steps": 1,
        "gradient_accumulation_steps": 2,
    }

    def resume(
        step: int | None, tokens: int, max_steps: int, fill: Any = None, **others: int
    ) -> list[str]:
        caplog.clear()
        hf_distca.configure(settings(cost_model="analytic"))
        trainer = make(rows(), **{**changes, "max_steps": max_steps, **others})
        hf_distca.deal(trainer, tokens, fill=fill)
        checkpoint = None if step is None else str(tmp_path / f"checkpoint-{step}")
        trainer.train(resume_from_checkpoint=checkpoint)
        return [text for text in caplog.messages if "resumes after step" in text]

    assert resume(None, TOKENS, 2) == []
    assert resume(2, TOKENS, 5) == []
    assert resume(5, TOKENS, 7) == [], "in the second epoch"
    (said,) = resume(2, TOKENS // 2, 3)
    before, now = said.split(", now: ")
    assert all(fact in before for fact in ("'batches': 8", "'seed': 42", f"'tokens': {TOKENS}"))
    assert f"'tokens': {TOKENS // 2}" in now
    assert "tokens_per_rank, number of ranks, fill" in said
    for others, shown in (
        ({"data_seed": 7}, "'seed': 7"),
        ({"fill": "cut"}, "'batches': 6"),
        ({"gradient_accumulation_steps": 1}, "'gradient_accumulation_steps': 1}"),
    ):
        (said,) = resume(2, TOKENS, 3, **others)
        assert shown in said.split(", now: ")[1]


def evaluate(rank: int, ranks: int, dealt: bool, padding: bool) -> tuple[list[Any], float]:
    """Evaluate rows that are not dealt; return shapes and targets of predictions, and the loss."""
    hf_distca.configure(settings(cost_model="analytic"))
    seen: list[Any] = []

    def compute_metrics(found: Any) -> dict[str, float]:
        seen.append((found.predictions.shape, int((found.label_ids != -100).sum())))
        return {}

    trainer = make(rows(labels=documents(*LENGTHS)))
    trainer.compute_metrics = compute_metrics
    if padding:
        trainer.data_collator = DataCollatorForSeq2Seq(make_tokenizer())
    if dealt:
        hf_distca.deal(trainer, TOKENS // ranks)
    # Nine rows do not fill the batches of two ranks.
    short = trainer.eval_dataset.select(range(1, 10))
    loss = trainer.evaluate(short.add_column("labels", documents(*LENGTHS)[1:]))["eval_loss"]
    trainer.predict(short.add_column("labels", documents(*LENGTHS)[1:]))
    return seen, loss


@pytest.mark.parametrize("padding", [True, False], ids=["padded", "by default"])
def test_undealt_evaluation_counts_each_document_once(rank_pool: RankPools, padding: bool) -> None:
    (seen, loss), *_ = rank_pool(2)(evaluate, 2, True, padding)
    targets = sum(LENGTHS[1:]) - (0 if padding else len(LENGTHS[1:]))
    assert [(shape[0], count) for shape, count in seen] == [(9, targets)] * 2
    if padding:  # without `deal`, the default collator makes no batch of these rows
        assert rank_pool(2)(evaluate, 2, False, padding)[0] == (seen, pytest.approx(loss))


def make_texts() -> Dataset:
    """Make rows of prompts and completions as text."""
    some = [ids for ids in documents(*LENGTHS) if len(ids) > 1]
    prompts = [text_of(ids[: len(ids) // 2]) for ids in some]
    completions = [text_of(ids[len(ids) // 2 :]) for ids in some]
    return Dataset.from_dict({"prompt": prompts, "completion": completions})


# Arguments of `SFTConfig`, and the data.
TRL: dict[str, tuple[dict[str, Any], Callable[[], Dataset]]] = {
    "prompt and completion": ({}, make_texts),
    "packing": ({"max_length": 64, "packing": True}, make_texts),
    "LoRA": ({}, make_texts),
    "dft": ({"loss_type": "dft"}, make_texts),
    "bfloat16": ({"bf16": True, "ddp_find_unused_parameters": None}, make_texts),
    OFFLOADED: (OFFLOADING, make_texts),
}


def make_trl(implementation: str, data: Dataset, peft: Any = None, **changes: Any) -> Trainer:
    from trl import SFTConfig, SFTTrainer

    warnings.simplefilter("ignore", FutureWarning)  # TRL uses deprecated names
    disable_progress_bars()
    always = {**COMMON, "output_dir": tempfile.mkdtemp(), "bf16": False, "max_length": None}
    return SFTTrainer(
        tiny_llama(implementation),
        SFTConfig(**{**always, **changes}),
        train_dataset=data,
        processing_class=make_tokenizer(),
        peft_config=peft,
    )


def train_trl(rank: int, ranks: int, implementation: str, name: str) -> list[float]:
    from peft import LoraConfig
    from trl.kernels import ChunkedLogProbFunction as chunked  # noqa: N813

    changes, data = TRL[name]
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"]) if name == "LoRA" else None
    trainer = make_trl(
        implementation, data(), peft, **{"max_steps": 4, "learning_rate": 1e-2, **changes}
    )
    with (
        offload_unpinned(name == OFFLOADED),
        patch.object(chunked, "forward", wraps=chunked.forward) as forward,
    ):
        hf_distca.deal(trainer, TOKENS // ranks).train()
    assert forward.called, "TRL computes the loss in chunks"
    return losses(trainer)


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("name", in_turn(TRL, 6))
def test_trl_sft_on_dealt_documents_trains_as_one_process(rank_pool: RankPools, name: str) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    skip_before_offloading(name)
    expected = train_trl(0, 1, "sdpa", name)
    tolerance = 2e-2 if TRL[name][0].get("bf16") else 1e-5  # the values include gradient norms
    assert rank_pool(2)(train_trl, 2, "distca", name)[0] == pytest.approx(expected, rel=tolerance)


# Arguments of `SFTConfig` that choose targets, and the data.
OF_TRL: dict[str, tuple[dict[str, Any], Callable[[], Dataset]]] = {
    "completions": ({}, make_texts),
    "prompts, too": ({"completion_only_loss": False}, make_texts),
    "padding-free": ({"padding_free": True}, make_texts),
    "packed": ({"packing": True, "max_length": 64}, make_texts),
    "labels": ({}, lambda: rows(labels=[[-100] * 3 + ids[3:] for ids in documents(*LENGTHS)])),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated and will be removed:FutureWarning")
@pytest.mark.parametrize("name", OF_TRL)
def test_dealt_shares_have_the_targets_of_the_collator_of_trl(name: str) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    changes, data = OF_TRL[name]
    trainer = make_trl("distca", data(), **changes)
    columns = {"input_ids", "labels", "seq_lengths"}  # the columns that TRL keeps
    rows_of_trl = [
        {name: row[name] for name in columns & row.keys()} for row in trainer.train_dataset
    ]
    theirs = sum(
        int((trainer.data_collator([row])["labels"][:, 1:] != -100).sum()) for row in rows_of_trl
    )
    shares = hf_distca.deal(trainer, 1024, fill="whole").train_dataset
    assert sum(int((share["shift_labels"] != -100).sum()) for share in shares) == theirs
