"""A training step on the same documents in each of the ways that `benchmarks/steps/peers.py`
compares: one class a way.

All train the same Llama from the same weights with plain SGD, in float32, and divide losses by the
number of targets of the global batch. So losses after the first step are equal only if gradients
are. Each way is set up as its own documentation says.
"""

from __future__ import annotations

import argparse
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from transformers import BloomConfig, BloomForCausalLM, DataCollatorWithFlattening
from transformers.trainer_pt_utils import BatchRebalanceSampler

import hf_distca
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.schedule.balance import balance
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.load import PlanLoad
from step_time import plain_model_of

Batch = dict[str, Any]

RATE = 0.1  # of SGD: large enough that losses of later steps tell wrong gradients
# narrow, so that attention takes most of a step, as it does in a large model on long documents.
HIDDEN = 128
ROWS = 4  # rows of documents in the global batch, each as many tokens as one of 4 ranks holds


def lengths_of(tokens: int) -> list[list[int]]:
    """Lengths of the documents of a global batch of so many tokens, by row: one document that fills
    a row, and shorter ones.
    """
    row, draw = tokens // ROWS, np.random.default_rng(0)
    rows = [[row]]
    for _ in range(ROWS - 1):
        shares = draw.lognormal(0, 0.8, 9)
        ends = np.round(np.cumsum(shares) / shares.sum() * row).astype(int)
        rows.append(np.diff(ends, prepend=0).tolist())
    return rows


class Documents:
    """The documents of the global batch, and which of them each rank packs.

    Attributes:
        rows: of each rank, the token ids (length,) of its documents, in order.
        all: the documents of all ranks.
        targets: tokens that are predicted, in the whole batch.
    """

    def __init__(self, tokens: int, ranks: int) -> None:
        draw, lengths = torch.Generator().manual_seed(0), lengths_of(tokens)
        rows = [[torch.randint(0, 512, (n,), generator=draw) for n in row] for row in lengths]
        of_rank = ROWS // ranks
        self.rows = [
            list(chain(*rows[rank * of_rank : (rank + 1) * of_rank])) for rank in range(ranks)
        ]
        self.all = list(chain(*rows))
        self.targets = sum(len(document) - 1 for document in self.all)


def pairs(*lengths: int) -> float:
    """Query-key pairs of causal attention within sequences of these lengths."""
    return float(sum(n * (n + 1) / 2 for n in lengths))


class DataParallel:
    """Each rank computes its own micro-batches, and DDP adds up gradients.

    Attributes:
        tokens: that this rank computes in a step, with padding.
        pairs: of query and key that its attention computes, of all heads; of some of the heads they
            count in part.
    """

    implementation = "sdpa"

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int) -> None:
        self.arguments, self.rank, self.ranks = arguments, rank, ranks
        self.documents = Documents(arguments.tokens, ranks)
        self.model = torch.nn.parallel.DistributedDataParallel(
            plain_model_of(arguments, self.implementation, HIDDEN)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE)
        self.batches = self.micro_batches()
        self.tokens = sum(batch["input_ids"].numel() for batch in self.batches)
        self.pairs = self.pairs_of_rank()

    def micro_batches(self) -> list[Batch]:
        """What this rank computes in a step."""
        raise NotImplementedError

    def pairs_of_rank(self) -> float:
        return pairs(*map(len, self.documents.rows[self.rank]))

    def step(self) -> float:
        """Train once; returns the loss of the global batch."""
        total = torch.zeros((), dtype=torch.float64)
        for batch in self.batches:
            loss = self.model(
                **batch, use_cache=False, num_items_in_batch=self.documents.targets
            ).loss
            (loss * self.ranks).backward()  # DDP divides by it
            total += loss.detach()
        dist.all_reduce(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(total)


class Alone(DataParallel):
    """One process, whose sdpa computes one document at a time: what losses are compared with."""

    def micro_batches(self) -> list[Batch]:
        return [
            {"input_ids": document[None], "labels": document[None]}
            for document in self.documents.all
        ]

    def pairs_of_rank(self) -> float:
        return pairs(*map(len, self.documents.all))


class Packed(DataParallel):
    """transformers' own packing: position ids that begin anew, from which it makes a dense mask for
    sdpa.
    """

    def micro_batches(self) -> list[Batch]:
        rows = [{"input_ids": document.tolist()} for document in self.documents.rows[self.rank]]
        return [DataCollatorWithFlattening(return_tensors="pt")(rows)]


class Rebalanced(DataParallel):
    """The Trainer's ``train_sampling_strategy="batch_rebalance"``, whose batches are padded to
    their longest document.
    """

    def micro_batches(self) -> list[Batch]:
        lengths = [len(document) for document in self.documents.all]
        sampler = BatchRebalanceSampler(
            lengths, len(lengths), self.ranks, 1, shuffle=False, rank=self.rank
        )
        self.chosen = [self.documents.all[index] for index in next(iter(sampler))]
        ids, labels = (
            pad_sequence(self.chosen, batch_first=True, padding_value=value) for value in (0, -100)
        )
        return [{"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}]

    def pairs_of_rank(self) -> float:
        return pairs(*[max(map(len, self.chosen))] * len(self.chosen))


class RebalancedAndPacked(Rebalanced):
    """The same choice of documents without padding: packed, and without a dense mask, in the kernel
    of hf-distca on one rank.
    """

    implementation = "distca"

    def micro_batches(self) -> list[Batch]:
        super().micro_batches()
        return [
            hf_distca.PackingCollator()(
                [{"documents": [document.tolist() for document in self.chosen]}]
            )
        ]

    def pairs_of_rank(self) -> float:
        return pairs(*map(len, self.chosen))

    def step(self) -> float:
        with hf_distca.balancing(False):
            return super().step()


class AsGiven(DataParallel):
    """hf-distca on the same packing."""

    implementation = "distca"

    def micro_batches(self) -> list[Batch]:
        documents = [document.tolist() for document in self.documents.rows[self.rank]]
        return [hf_distca.PackingCollator()([{"documents": documents}])]

    def layout(self) -> Layout:
        return Layout.from_lengths(
            [[len(document) for document in row] for row in self.documents.rows]
        )

    def pairs_of_rank(self) -> float:
        (key,), config = list_layer_keys(self.model.module, None, "cpu"), hf_distca.DistCAConfig()
        cost = make_initial_cost(key, config)
        return float(PlanLoad(balance(self.layout(), cost, config), cost).pairs[self.rank])


class Unbalanced(AsGiven):
    """The same packing and kernel, and nothing is moved: what a kernel for packed documents brings
    by itself.
    """

    def pairs_of_rank(self) -> float:
        return DataParallel.pairs_of_rank(self)

    def step(self) -> float:
        with hf_distca.balancing(False):
            return super().step()


class Dealt(AsGiven):
    """hf-distca where it deals the documents of the global batch as well."""

    def micro_batches(self) -> list[Batch]:
        rows = [document.tolist() for document in self.documents.all]
        tokens = self.arguments.tokens // self.ranks
        shares = hf_distca.document_shares(
            rows, tokens, model=self.model.module, ranks=self.ranks, seed=None
        )
        return [hf_distca.PackingCollator()([shares[self.rank]])]

    def layout(self) -> Layout:
        (layout,) = self.batches[0]["distca_documents"].dealt_share.layouts
        return layout


def unknown_family(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """hf-distca on a Bloom, whose attention does not ask for an implementation."""
    config = BloomConfig(
        vocab_size=512, hidden_size=64, n_layer=1, n_head=2, attn_implementation="distca"
    )
    BloomForCausalLM(config)(torch.zeros(1, 8, dtype=torch.long))
