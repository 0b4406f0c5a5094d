"""Shares of dealt global batches. A share is one rank's part of a batch. It contains the layout of
the whole batch, and may contain plans.

A *global batch* holds the tokens of all ranks for one micro-batch. A process that loads the share
of a rank also knows the documents of the other ranks. So it can deal the documents and make the
plans by itself. All processes get the same result, without an exchange.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import compress, product
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal, deal_in_order, deal_nano_batches
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.load import PlanLoad, compute_imbalance
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks

Placement = Literal["dealt", "in order"]


class PlanJob(NamedTuple):
    """Inputs of a plan, except its layout.

    Attributes:
        key: key of the plan.
        cost: cost model of the layers.
        config: settings.
        ranks: speeds and nodes of the ranks; without nodes if the cost model ignores nodes.
        has_tokens: for each rank, whether it gets a share of the batch; None if all ranks do.
    """

    key: PlanKey
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks = UNIFORM_RANKS
    has_tokens: tuple[bool, ...] | None = None

    @classmethod
    def from_settings(
        cls,
        key: PlanKey,
        cost: CostModel,
        config: DistCAConfig,
        ranks: Ranks,
        has_tokens: tuple[bool, ...] | None = None,
    ) -> PlanJob:
        """Make the job of a plan from these settings.

        For a whole batch, ping-pong is off in the job, because only nano-batches hide exchanges.
        """
        return cls(
            key,
            cost,
            replace(config, ping_pong=key.nano > 0),
            ranks.without_irrelevant_nodes(cost),
            has_tokens,
        )


@dataclass(frozen=True, eq=False)
class DealtShare:
    """A rank's share of a global batch, with the layout of the whole batch.

    It travels inside `PackedDocuments`, which training engines pass on unchanged.

    Attributes:
        batch_id: epoch and number of the global batch.
        rank: rank that the share is for; -1 for a rank that gets no tokens.
        layouts: the layout of the whole batch, or the layouts of both nano-batches, which have no
            document in common.
        digest: hash of the documents, below 2**56; the same on all ranks.
        per_node: number of ranks per node for which the batch was dealt; None if dealing treated
            all ranks alike.
        in_order_imbalance: estimated imbalance of attention if documents filled one rank after
            another in their order.
        plans: plans made so far. A loader's workers make the first plans.
    """

    batch_id: tuple[int, int]
    rank: int
    layouts: tuple[Layout, ...]
    digest: int
    per_node: int | None = None
    in_order_imbalance: float = 1.0
    plans: dict[PlanJob, Plan] = field(default_factory=dict)

    def __str__(self) -> str:
        epoch, number = self.batch_id
        return f"global batch {number} of epoch {epoch}"

    @property
    def ranks(self) -> int:
        """Number of ranks that share the batch."""
        return self.layouts[0].world_size

    @property
    def longest_document(self) -> int:
        """Number of tokens of the longest document in the global batch."""
        return max(layout.longest for layout in self.layouts)

    @cached_property
    def whole_layout(self) -> Layout:
        """Layout of the whole batch. On each rank, the first nano-batch lies before the second."""
        return self.layouts[0] if len(self.layouts) == 1 else Layout.concatenate(*self.layouts)

    @property
    def is_cut(self) -> bool:
        """True if any document lies on several ranks, so that no rank can compute it alone."""
        return bool(self.whole_layout.has_many_ranks.any())

    @property
    def first_nano_tokens(self) -> int | None:
        """Number of this rank's tokens in the first nano-batch.

        None if the batch has no nano-batches, or if a nano-batch is empty on some rank.
        """
        if len(self.layouts) == 1 or any(layout.query_tokens.min() == 0 for layout in self.layouts):
            return None
        return int(self.layouts[0].query_tokens[self.rank])

    def check_group(self, group: AttentionGroup) -> None:
        """Raise `LayoutError` unless the share is for this rank of this group."""
        has_tokens = group.has_tokens or (True,) * group.size
        if not has_tokens[group.rank]:
            return
        ranks = tuple(compress(group.ranks, has_tokens))
        if self.ranks != len(ranks):
            raise LayoutError(
                f"{self} is dealt to {self.ranks} ranks, but the attention group has {len(ranks)}: "
                f"{ranks}. Deal batches to as many ranks as share attention."
            )
        if ranks[self.rank] != group.ranks[group.rank]:
            raise LayoutError(
                f"rank {group.ranks[group.rank]} holds the share of rank {ranks[self.rank]} of "
                f"{self}. Read shares in order, one per batch, with as many processes as there are "
                "shares of a global batch."
            )

    def plan(self, job: PlanJob) -> Plan:
        """Return the plan of a job. The plan is made at the first call for this job, and kept."""
        if job not in self.plans:
            layout = self.layouts[job.key.nano - 1] if job.key.nano else self.whole_layout
            if job.has_tokens is not None:
                layout = layout.place_on_holders(job.has_tokens)
            plan = self.plans[job] = balance(layout, job.cost, job.config, job.ranks)
            _ = plan.digest  # caches the digest, so that the training need not compute it
        return self.plans[job]


@dataclass(eq=False)
class Dealing:
    """Deals global batches to ranks, and makes plans for them in the process that loads them.

    Attributes:
        ranks: number of ranks that share a global batch.
        tokens_per_rank: number of tokens of every rank, or a sequence with the number of each rank.
        costs: cost models of one or more kinds of layer, each under the key of a plan for a whole
            batch. The first cost model decides how documents are dealt.
        config: settings of the plans. A training with other settings makes its own plans.
        ranks_per_node: number of ranks per node, for dealing and for plans; None to treat all ranks
            alike.
        placement: "dealt" to balance attention. As a baseline, "in order" fills one rank after
            another with documents in their order, and cuts a document if the rank is full.

    Raises:
        ConfigError: if `placement` is neither "dealt" nor "in order".
    """

    ranks: int
    tokens_per_rank: int | Sequence[int]
    costs: Mapping[PlanKey, CostModel]
    config: DistCAConfig
    ranks_per_node: int | None = None
    placement: Placement = "dealt"

    def __post_init__(self) -> None:
        placements = get_args(Placement)
        if self.placement not in placements:
            raise ConfigError(
                f"placement={self.placement!r} must be one of {', '.join(map(repr, placements))}."
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of a global batch."""
        tokens = self.tokens_per_rank
        return sum(tokens) if isinstance(tokens, Sequence) else self.ranks * tokens

    def deal_layouts(self, lengths: IntArray) -> tuple[Layout, ...]:
        """Deal the documents of one global batch to ranks.

        Args:
            lengths: (documents,) tokens of each document; they add up to `tokens`.

        Returns:
            One layout, or the layouts of both nano-batches with ping-pong.

        Raises:
            LayoutError: if lengths do not fill the ranks; see `deal`.
        """
        if self.placement == "in order":
            return (deal_in_order(lengths, self.ranks, self.tokens_per_rank),)
        dealt = (deal_nano_batches if self.config.ping_pong else deal)(
            lengths,
            self.ranks,
            self.tokens_per_rank,
            next(iter(self.costs.values())),
            tile=self.config.tile,
            ranks_per_node=self.ranks_per_node,
        )
        return dealt if isinstance(dealt, tuple) else (dealt,)

    def estimate_in_order(self, lengths: IntArray) -> float:
        """Estimate the imbalance of attention for placement "in order"."""
        return self.estimate_imbalance(deal_in_order(lengths, self.ranks, self.tokens_per_rank))

    def estimate_dealt(self, lengths: IntArray) -> float:
        """Estimate the imbalance of attention if documents are dealt and plans are used."""
        cost, ranks = next(iter(self.costs.values())), Ranks(per_node=self.ranks_per_node)
        plans = [balance(part, cost, self.config, ranks) for part in self.deal_layouts(lengths)]
        return compute_imbalance(
            np.sum([PlanLoad(plan, cost).compute_seconds for plan in plans], 0)
        )

    def estimate_imbalance(self, layout: Layout) -> float:
        """Estimate the imbalance of attention if each rank computes only for its own tokens."""
        seconds = next(iter(self.costs.values())).estimate_seconds(layout.length, layout.end)
        return compute_imbalance(np.bincount(layout.rank, seconds, self.ranks).astype(np.float64))

    def make_share(
        self,
        lengths: IntArray,
        batch_id: tuple[int, int],
        rank: int,
        document_ids: IntArray | None = None,
    ) -> PackedDocuments:
        """Make a rank's share of a global batch.

        The share describes the rank's runs of tokens. In a loader's worker, this function also
        makes the plans.

        Args:
            lengths: (documents,) tokens of each document. In the share, the number of a document is
                its index in `lengths`.
            batch_id: epoch and number of the global batch.
            rank: rank that gets the share.
            document_ids: integers that identify the documents in addition to their lengths; None
                for lengths alone. Ranks with different documents get an error when they announce
                the share.
        """
        share = DealtShare(
            batch_id,
            rank,
            self.deal_layouts(lengths),
            hash_numbers([lengths] if document_ids is None else [lengths, document_ids]),
            self.ranks_per_node,
            self.estimate_in_order(lengths),
        )
        # Outside of a worker, plans are made later, with the rates that the training has learned.
        if self.ranks > 1 and get_worker_info() is not None:
            self._plan(share)
        runs = share.whole_layout.list_segments(rank)
        return PackedDocuments(
            [run.length for run in runs],
            [run.start for run in runs],
            [run.document for run in runs],
            dealt_share=share,
        )

    def _plan(self, share: DealtShare) -> None:
        """Make the plans of a share with the cost models in `costs`."""
        ranks = Ranks(per_node=share.per_node)
        nanos = (0,) if share.first_nano_tokens is None else (1, 2)
        for (key, cost), nano in product(self.costs.items(), nanos):
            share.plan(PlanJob.from_settings(key._replace(nano=nano), cost, self.config, ranks))


def hash_numbers(columns: Iterable[npt.ArrayLike]) -> int:
    """Hash columns of integers to a number below 2**56."""
    numbers = b"".join(np.asarray(column, dtype=np.int64).tobytes() for column in columns)
    return int.from_bytes(hashlib.sha256(numbers).digest()[:7], "big")
