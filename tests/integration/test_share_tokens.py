"""Batches that ranks have drawn, dealt anew: equal tokens, and the numbers of the batches as they
were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_dealt import model_for, settings
from test_loaders import jamba
from transformers import DataCollatorWithFlattening, Trainer

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.checks.share_readers import check_sharing
from ranks import RankPool
from recorded import counted_planning
from tiny_runs import documents, losses, make_trainer
from turns import in_turn

# Of each rank's micro-batches; the first has a document longer than its share.
LENGTHS: tuple[list[list[int]], ...] = (
    [[150, 3], [20, 30]],
    [[16, 1], [8] * 6],
    [[40], [21]],
    [[7, 7], [90, 1, 1]],
)


def drawn(rank: int, form: str) -> list[dict[str, Any]]:
    made = []
    for number, lengths in enumerate(LENGTHS[rank]):
        texts = documents(*lengths, seed=10 * rank + number)
        if form != "padded":
            made.append(hf_distca.PackingCollator()([{"documents": texts}]))
            if form == "flattened":
                made[-1] = flattened(texts)
            if form == "filled up":
                made[-1] = filled_up(made[-1])
            continue
        longest = max(lengths)  # padded on the left, as some tokenizers do
        ids, mask = (torch.zeros((len(texts), longest), dtype=torch.long) for _ in range(2))
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :], mask[row, longest - len(text) :] = (
                torch.tensor(text),
                1,
            )
        made.append(
            {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        )
        if len(set(lengths)) == 1:  # one row of positions stands for all
            made[-1]["position_ids"] = torch.arange(longest)[None]
    return made


def flattened(texts: list[list[int]]) -> dict[str, Any]:
    """As padding-free loaders have it for flash attention."""
    rows = [{"input_ids": text, "labels": text} for text in texts]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = dict(collate(rows))
    assert {
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "seq_idx",
        "position_ids",
    } <= batch.keys()
    return batch


def filled_up(batch: dict[str, Any]) -> dict[str, Any]:
    """A packed batch with padding at its end, which only the documents and the mask tell of."""
    ids, labels, packed = batch["input_ids"], batch["labels"], batch["distca_documents"]
    return {
        "input_ids": torch.nn.functional.pad(ids, (0, 5)),
        "labels": torch.nn.functional.pad(labels, (0, 5), value=-100),
        "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (0, 5)),
        "distca_documents": PackedDocuments((*packed.lengths, 5)),
    }


def summed(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The sum of the losses of a batch's targets, in float64."""
    targets = batch["shift_labels"]
    known = {name: batch[name] for name in ("input_ids", "position_ids", "distca_documents")}
    logits = model(**known, use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, targets[0], reduction="sum")


def train(
    rank: int, ranks: int, form: str, ping_pong: bool
) -> tuple[float, dict[str, torch.Tensor], list[int], list[str]]:
    hf_distca.configure(settings(ping_pong=ping_pong))
    model, total = model_for("full", "distca"), torch.zeros((), dtype=torch.float64)
    for _ in range(2):  # in the second round it is known what layers there are
        model.zero_grad()
        total.zero_()
        batches = hf_distca.share_tokens(drawn(rank, form))
        with counted_planning() as planning:
            for batch in batches:
                loss = summed(model, batch)
                loss.backward()
                total += loss.detach()
    if ranks > 1:
        dist.all_reduce(total)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return total.item(), grads, [batch["input_ids"].numel() for batch in batches], planning


@pytest.mark.parametrize(
    ("ranks", "form", "ping_pong"),
    in_turn(
        [
            (ranks, *way)
            for ranks in (2, 4)
            for way in [
                ("packed", False),
                ("padded", False),
                ("filled up", False),
                ("flattened", False),
                ("packed", True),
            ]
        ],
        16,
        [(2, "packed", True), (4, "padded", False)],
    ),
)
def test_shared_tokens_train_as_the_batches_that_were_drawn(
    rank_pool: Callable[[int], RankPool], ranks: int, form: str, ping_pong: bool
) -> None:
    model, total = model_for("full", "sdpa"), 0.0
    for rank in range(ranks):
        for number, lengths in enumerate(LENGTHS[rank]):
            for text in documents(*lengths, seed=10 * rank + number):
                ids = torch.tensor(text)
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                loss = (
                    torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="sum")
                    if len(ids) > 1
                    else logits.sum() * 0
                )
                loss.backward()
                total += loss.item()
    results = rank_pool(ranks)(train, ranks, form, ping_pong)
    for same_total, grads, _, planning in results:
        assert same_total == pytest.approx(total, rel=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-9, atol=1e-10)
        assert planning == []
    for number in range(2):
        tokens = [sizes[number] for _, _, sizes, _ in results]
        assert sum(tokens) == sum(sum(LENGTHS[rank][number]) for rank in range(ranks))
        assert max(tokens) - min(tokens) <= 1


class SharingTrainer(hf_distca.DistCATrainerMixin, Trainer):
    shares_tokens = True


def under_the_trainer(rank: int, kind: str) -> list[float]:
    rows = [
        {"documents": documents(*lengths, seed=n)}
        for n, lengths in enumerate([[150, 3], [16, 1], [96], [30, 2]] * 3)
    ]
    trainer = make_trainer(
        "distca" if kind == "shared" else "sdpa",
        rows,
        kind=SharingTrainer if kind == "shared" else Trainer,
        bf16=False,
        max_steps=3,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    return losses(trainer)


def test_a_trainer_shares_the_tokens_that_its_ranks_draw(
    rank_pool: Callable[[int], RankPool],
) -> None:
    shared, plain = (rank_pool(2)(under_the_trainer, kind) for kind in ("shared", "plain"))
    assert shared[0] == pytest.approx(plain[0], rel=1e-5)
    assert len(shared[0]) == 6


def refused(
    rank: int, implementation: str, arguments: dict[str, Any], attributes: dict[str, Any]
) -> tuple[str, int, bool]:
    trainer = make_trainer(
        implementation,
        [{"documents": documents(20, 12)}] * 2,
        kind=SharingTrainer,
        eval_dataset=[{"documents": documents(20)}] * 2,
        max_steps=1,
        **arguments,
    )
    for name, value in attributes.items():
        setattr(trainer, name, value)
    with pytest.raises(hf_distca.UnsupportedError) as caught:
        trainer.train()
    # Evaluation shares nothing.
    return str(caught.value), trainer.state.global_step, trainer.evaluate()["eval_loss"] != 0


def named_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    return outputs.logits.sum()


REFUSED: dict[str, tuple[tuple[str, dict[str, Any], dict[str, Any]], str]] = {
    "smoothing": (
        ("distca", {"label_smoothing_factor": 0.1}, {}),
        "label_smoothing_factor=0.1 shifts `labels`, which lack",
    ),
    "own mean": (
        ("distca", {"average_tokens_across_devices": False}, {}),
        "Set average_tokens_across_devices=True.",
    ),
    "loss of labels": (
        ("distca", {}, {"compute_loss_func": named_loss}),
        "compute_loss_func=named_loss gets `labels`",
    ),
    "loss that is a mean": (
        ("distca", {}, {"model_accepts_loss_kwargs": False}),
        "the loss of LlamaForCausalLM is a mean",
    ),
    "sdpa": (
        ("sdpa", {}, {}),
        "no more than one rank. Load the model with it, or leave shares_tokens out.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_trainer_that_needs_whole_documents_shares_no_tokens(
    rank_pool: Callable[[int], RankPool], name: str
) -> None:
    """As of a data set of shares, it would train on something else in silence."""
    given, said = REFUSED[name]
    for error, steps, evaluates in rank_pool(2)(refused, *given):
        assert error.startswith(
            "shares_tokens = True, which deals what 2 ranks have drawn among them, and "
        )
        assert said in error
        assert steps == 0
        assert evaluates


def test_a_model_that_needs_whole_documents_shares_no_tokens() -> None:
    trainer = make_trainer("distca", [], kind=SharingTrainer, model=jamba(), max_steps=1)
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"jamba models need whole documents: .* whole, leave shares_tokens out",
    ):
        check_sharing(trainer, 2)
    check_sharing(trainer, 1)


def test_a_rank_alone_trains_with_any_loss() -> None:
    rows = [{"documents": documents(20, 12)}]
    trainer = make_trainer(
        "distca", rows, kind=SharingTrainer, max_steps=1, label_smoothing_factor=0.1
    )
    assert trainer.train().training_loss > 0


def wrong(rank: int, what: str) -> str:
    hf_distca.configure(settings(timeout_seconds=5))
    batches = drawn(rank, "packed")
    if what == "column":
        batches[0]["token_type_ids"] = torch.zeros(1)
    elif what == "positions":
        batches[0]["position_ids"][0, 2:4] += 100
    elif what == "tokens":
        one = torch.ones((1, 1), dtype=torch.long)
        batches = [{"input_ids": one, "attention_mask": one - rank}]
    elif rank == 1:
        batches.pop()
    with pytest.raises(hf_distca.DistCAError) as caught:
        hf_distca.share_tokens(batches)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("column", "a batch holds token_type_ids, and share_tokens deals"),
        ("positions", "position_ids of a batch change by 101 after token"),
        ("count", "different numbers of micro-batches in sharing tokens"),
        (
            "tokens",
            "micro-batch 1 has 1 tokens on 2 ranks: share_tokens deals at least one to each",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(
    rank_pool: Callable[[int], RankPool], what: str, said: str
) -> None:
    for error in rank_pool(2)(wrong, what):
        assert said in error, error


def share_rows(rank: int) -> list[bool]:
    """Whether rows with one row of positions are shared as rows with one for each."""
    ids, places = torch.arange(16).reshape(2, 8) + rank, torch.arange(8)[None]
    one, each = (
        hf_distca.share_tokens([{"input_ids": ids, "labels": ids, "position_ids": positions}])[0]
        for positions in (places, places.expand(2, 8))
    )
    return [torch.equal(one[name], each[name]) for name in ("input_ids", "shift_labels")]


def test_one_row_of_positions_holds_for_all(rank_pool: Callable[[int], RankPool]) -> None:
    assert rank_pool(2)(share_rows) == [[True, True]] * 2


def test_alone_batches_stay_as_they_are() -> None:
    hf_distca.configure(settings())
    batches = drawn(0, "packed")
    assert all(
        one is other for one, other in zip(hf_distca.share_tokens(batches), batches, strict=True)
    )
    assert np.array_equal(batches[0]["input_ids"][0, :3], documents(150, 3, seed=0)[0][:3])
