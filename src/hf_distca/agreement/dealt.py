"""Contents of a rank's share of a dealt global batch: the layout of all ranks, and plans.

A *global batch* holds the tokens of all ranks for one micro-batch. A process that loads a rank's
share knows the documents of the other ranks, so it can deal and plan alone, with the same result:
ranks need not meet for a plan.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from threading import current_thread
from typing import Literal, NamedTuple, get_args
from weakref import WeakMethod

import numpy as np

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.monitor import AwaitedThread
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal, deal_in_order, deal_nano_batches
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.ranks import UNIFORM_RANKS, Ranks

__all__ = ["Dealing", "Dealt", "Placement", "PlanJob", "plan_fetched"]

Placement = Literal["dealt", "in order"]


# Who plans the shares that are fetched in a process, and the process: workers that are forked from it only make them.
_fetching: tuple[WeakMethod[Callable[[Dealt], None]], int] | None = None


def plan_fetched(plan: Callable[[Dealt], None]) -> None:
    """Call a bound method with every share that is fetched in this process, before
    its step, as long as the method's object lives.
    """
    global _fetching
    _fetching = WeakMethod(plan), os.getpid()


class PlanJob(NamedTuple):
    """Inputs of a plan beside a layout, as for `balance`.

    `ranks` are those that the cost model tells apart.

    Where a pool of servers takes part, `holds` says for each rank whether the batch is dealt to it.
    """

    key: PlanKey
    cost: CostModel
    config: DistCAConfig
    ranks: Ranks = UNIFORM_RANKS
    holds: tuple[bool, ...] | None = None

    @classmethod
    def of(
        cls, key: PlanKey, cost: CostModel, config: DistCAConfig, ranks: Ranks, holds: tuple[bool, ...] | None = None
    ) -> PlanJob:
        """Make the job of a plan under these settings.

        Layers that are left whole hide no exchange, whatever the settings are.
        """
        return cls(key, cost, replace(config, ping_pong=key.nano > 0), ranks.without_irrelevant_nodes(cost), holds)


class Dealt:
    """A rank's share of a global batch, with the layout of the whole batch.

    This is no dataclass, because engines that move batches to a device, or cast their contents,
    rebuild dataclasses.

    The arguments are those of `Dealing.share`.

    Attributes:
        layouts: tokens of each rank: one layout, or those of both nano-batches, which share no
            document.
        documents: hash of the documents, below 2**56; the same on all ranks.
        per_node: ranks of a node, for which it was dealt; None if nodes were not told apart.
        settings: settings under which its loader plans.
    """

    def __init__(
        self, dealing: Dealing, batch: tuple[int, int], rank: int, lengths: IntArray, names: IntArray | None = None
    ) -> None:
        self.batch, self.rank, self.layouts = batch, rank, dealing.layouts(lengths)
        numbers = [np.asarray(column, dtype=np.int64).tobytes() for column in (lengths, names) if column is not None]
        self.documents = int.from_bytes(hashlib.sha256(b"".join(numbers)).digest()[:7], "big")
        self.per_node, self.settings = dealing.ranks_per_node, dealing.config
        self._plans: dict[PlanJob, Plan] = {}
        self._planned_here = 0
        self._beside: tuple[AwaitedThread, ...] = ()

    @classmethod
    def of_others(cls, layouts: tuple[Layout, ...], batch: tuple[int, int], documents: int, config: DistCAConfig) -> Dealt:
        """Make the view of a global batch for a server of a pool, which gets no
        share; for the arguments see the attributes.
        """
        dealt = cls.__new__(cls)
        dealt.__dict__ |= {"layouts": layouts, "batch": batch, "documents": documents, "settings": config, "rank": -1}
        dealt.__dict__ |= {"per_node": None, "_plans": {}, "_planned_here": 0, "_beside": ()}
        return dealt

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_planned_here": 0, "_beside": ()}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self.fetch()  # a loader's worker has sent it

    def fetch(self) -> bool:
        """Pass the share to the method that plans fetched shares in this process.

        Return whether there is one.
        """
        known, process = _fetching or (None, None)
        plan = known() if known is not None and process == os.getpid() else None
        if plan is not None:
            plan(self)
        return plan is not None

    def __str__(self) -> str:
        epoch, number = self.batch
        return f"global batch {number} of epoch {epoch}"

    @property
    def ranks(self) -> int:
        """Number of ranks that share the batch."""
        return self.layouts[0].world_size

    @property
    def longest(self) -> int:
        """Number of tokens of the longest document in the global batch."""
        return max(layout.longest for layout in self.layouts)

    @cached_property
    def whole(self) -> Layout:
        """Layout of the whole batch: on each rank, the first nano-batch and then the second."""
        return self.layouts[0] if len(self.layouts) == 1 else Layout.concatenate(*self.layouts)

    @property
    def first_tokens(self) -> int | None:
        """Number of this rank's tokens in the first nano-batch; None if there are no two
        nano-batches, or one would be empty on some rank.
        """
        if len(self.layouts) == 1 or any(layout.query_tokens.min() == 0 for layout in self.layouts):
            return None
        return int(self.layouts[0].query_tokens[self.rank])

    def check_is_for(self, group: AttentionGroup) -> None:
        """Raise `LayoutError` unless the share is for this rank of this group."""
        if group.holds is not None and not group.holds[group.rank]:
            return  # a server takes part in all batches, and holds nothing of any
        ranks = [rank for rank, holds in zip(group.ranks, group.holds or [True] * group.size, strict=True) if holds]
        if self.ranks != len(ranks):
            raise LayoutError(
                f"{self} is dealt to {self.ranks} ranks, and the attention group has {len(ranks)}: {tuple(ranks)}. Deal to as "
                "many ranks as share attention."
            )
        if ranks[self.rank] != group.ranks[group.rank]:
            raise LayoutError(
                f"rank {group.ranks[group.rank]} holds the share of rank {ranks[self.rank]} of {self}: read shares in "
                "order, one a batch, with as many processes as they are dealt to."
            )

    def plan(self, job: PlanJob) -> Plan:
        """Return the plan of a kind of layer; it is made now, unless one
        was made before under the same settings.
        """
        beside = self._beside
        for thread in () if current_thread() in beside else beside:
            thread.join()
        if job not in self._plans:
            layout = self.layouts[job.key.nano - 1] if job.key.nano else self.whole
            if job.holds is not None:
                layout = layout.place_on_holders(job.holds)
            plan = self._plans[job] = balance(layout, job.cost, job.config, job.ranks)
            _ = plan.digest  # is compared; a loader's worker has the time for it
            self._planned_here += 1
        return self._plans[job]

    def plan_beside(self, jobs: Sequence[PlanJob]) -> None:
        """Start to make missing plans while this thread continues. `plan` waits for them."""
        earlier = self._beside

        def make() -> None:
            for thread in earlier:  # which may make the same plans
                thread.join()
            with suppress(Exception):  # whoever asks for the plan gets the error
                for job in missing:
                    self.plan(job)

        if missing := [job for job in jobs if job not in self._plans]:
            self._beside = (*earlier, AwaitedThread(make, "plans"))

    def take_planned_here(self) -> int:
        """Return the number of plans that this process made instead of the loader, since
        the last call or since the share was fetched.
        """
        count, self._planned_here = self._planned_here, 0
        return count

    def other_settings(self, key: PlanKey, config: DistCAConfig) -> str | None:
        """Describe settings that changed since the loader planned this batch; None if none
        did, or if it planned for other kinds of layers.
        """
        said = [
            f"{field.name} was {before!r} and is {now!r}"
            for field in fields(config)
            if (before := getattr(self.settings, field.name)) != (now := getattr(config, field.name))
        ]
        planned = {job.key.shape for job in self._plans}
        sizes = {shape.element_bytes for shape in planned if replace(shape, element_bytes=key.shape.element_bytes) == key.shape}
        if sizes and key.shape.element_bytes not in sizes:
            said.insert(0, f"elements had {min(sizes)} bytes and have {key.shape.element_bytes} (dtype)")
        return "; ".join(said) or None


@dataclass(eq=False)
class Dealing:
    """Settings for dealing global batches, and for planning them where they are loaded.

    It can be pickled.

    Attributes:
        ranks: number of ranks that share a global batch.
        tokens_per_rank: tokens of each, one number for all or one for each.
        costs: cost models of at least one kind of layer, by its plan (of whole batches). Documents
            are dealt by the first one.
        config: settings under which the batches will train. Under others, plans are made when they
            are needed.
        ranks_per_node: ranks of a node, for `deal` and for plans.
        placement: "dealt"; or "in order" for documents one after another, cut where a rank is full,
            to compare with.

    Raises:
        ConfigError: if there is no such placement.
    """

    ranks: int
    tokens_per_rank: int | Sequence[int]
    costs: Mapping[PlanKey, CostModel]
    config: DistCAConfig
    ranks_per_node: int | None = None
    placement: Placement = "dealt"

    def __post_init__(self) -> None:
        if self.placement not in get_args(Placement):
            raise ConfigError(f"placement={self.placement!r} must be one of {', '.join(map(repr, get_args(Placement)))}.")

    @property
    def tokens(self) -> int:
        """Number of tokens of a global batch."""
        tokens = self.tokens_per_rank
        return sum(tokens) if isinstance(tokens, Sequence) else self.ranks * tokens

    def layouts(self, lengths: IntArray) -> tuple[Layout, ...]:
        """Deal documents of these lengths, `ranks` times `tokens_per_rank`
        tokens together; for errors see `deal`.

        Returns:
            One layout, or with ping-pong those of both nano-batches.
        """
        if self.placement == "in order":
            return (deal_in_order(lengths, self.ranks, self.tokens_per_rank),)
        what = lengths, self.ranks, self.tokens_per_rank, next(iter(self.costs.values()))
        if self.config.ping_pong:
            return deal_nano_batches(*what, tile=self.config.tile, ranks_per_node=self.ranks_per_node)
        return (deal(*what, tile=self.config.tile, ranks_per_node=self.ranks_per_node),)

    def share(self, lengths: IntArray, batch: tuple[int, int], rank: int, names: IntArray | None = None) -> PackedDocuments:
        """Make a rank's share of a global batch: its runs of tokens,
        with the layout and plans of all ranks.

        Args:
            lengths: (documents,) tokens of each document. The share numbers documents by their
                index here.
            batch: epoch and number of the global batch.
            rank: rank that gets the share.
            names: integers that identify the documents beyond their lengths, or None. If documents
                differ between ranks, an error is raised.
        """
        dealt = Dealt(self, batch, rank, lengths, names)
        # Without workers the process that trains makes the shares, and knows by which rates it will plan.
        if self.ranks > 1 and not dealt.fetch():
            for key, cost in self.costs.items():
                for nano in (0,) if dealt.first_tokens is None else (1, 2):
                    dealt.plan(PlanJob.of(key._replace(nano=nano), cost, self.config, Ranks(per_node=dealt.per_node)))
            dealt.take_planned_here()
        runs = dealt.whole.list_segments(rank)
        lengths_, starts, documents = ([getattr(run, name) for run in runs] for name in ("length", "start", "document"))
        return PackedDocuments(lengths_, starts, documents, dealt=dealt)
