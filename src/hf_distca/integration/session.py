"""`Session`: what a process keeps between micro-batches: configuration, group, kernels, cost models, history.

Plans and routes are not among them; those live in the handle of their micro-batch.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import version

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.config import DistCAConfig
from hf_distca.errors import DistCADesyncError, LayoutError, UnsupportedError
from hf_distca.integration.documents import LocalDocuments
from hf_distca.integration.handle import Work
from hf_distca.integration.history import History, Micro
from hf_distca.integration.mesh import data_parallel_group, find_members
from hf_distca.kernels import Kernel, Scores, select_kernel
from hf_distca.runtime.calibrate import calibrate
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.route import Route
from hf_distca.runtime.server import AttentionServer
from hf_distca.runtime.trace import Trace, Tracer
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray, Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.scheduler import balance
from hf_distca.schedule.waves import Waves

__all__ = ["Session", "attention_seconds", "balancing", "configure", "current_session"]

# What a rank announces in front of its documents.
_COUNT, _AGREEMENT, _SPANS, _HALF, _EXCHANGES, _CONTEXT, _NANOSECONDS, _BYTES = range(8)
_HEADER = 8
_ALONE = AttentionGroup()


class Session:
    """One process's side of core attention. Use `current_session`; `configure` makes a new one."""

    def __init__(self, config: DistCAConfig, members: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        self.config = config
        self.meter = Meter()
        self.history = History()
        self.trace: Trace | None = None
        self._members = members
        self._group: AttentionGroup | None = None
        self._world: object = None
        self._costs: dict[tuple[AttentionShape, str], CostModel] = {}
        self._planned = 0
        # The last micro-batch of each kind of layer: what ranks measured in it is announced with the next one.
        self._last: dict[tuple[int | None, int | None, int], tuple[Micro, Meter]] = {}

    @property
    def group(self) -> AttentionGroup:
        """The attention group; made at the first use, and again after torch.distributed starts or restarts."""
        world = dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._group is None or world is not self._world:
            members = data_parallel_group(self._members) if isinstance(self._members, DeviceMesh) else self._members
            if members is None and world is not None:
                members = find_members()
            self._group = AttentionGroup.create(members, timeout_seconds=self.config.timeout_seconds)
            self._world = world
        return self._group

    @property
    def looks_for_mesh(self) -> bool:
        """Whether the ranks of the attention group are neither given nor found yet."""
        return self._members is None and self._group is None

    def found_mesh(self, mesh: DeviceMesh) -> None:
        """Take the attention group from the mesh of a model."""
        self._members = mesh

    def takes_part(self, training: bool, *, alone: bool = False) -> bool:
        """Whether other ranks take part in the attention of a module that trains, or does not; never if it is to be alone."""
        # Making the group needs all ranks: a rank that evaluates or generates alone must not ask for it.
        return not alone and (training or self.config.balance_evaluation) and self.group.size > 1

    def work_for(
        self,
        local: LocalDocuments,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        training: bool,
        alone: bool = False,
        window: int | None = None,
    ) -> Work:
        """Plan a micro-batch: together with the other ranks in training, alone otherwise.

        Args:
            local: this rank's documents.
            query, key, value: (batch, heads, length, width), for their shapes, dtype and device.
            training: whether the module is in training mode on this rank, and so on all.
            alone: whether this forward is one that the other ranks need not run, whatever the mode.
            window: keys that a row sees at most, None for all.
        """
        device = query.device
        keep = None if local.keep is None else torch.from_numpy(local.keep).to(device)
        if not self.takes_part(training, alone=alone):
            layout = _layout([local.rows], [0], spans=False)
            if local.spans and (alone or not training) and (local.rows[:, 1] > 0).any():
                raise UnsupportedError(
                    "a document that spans ranks met a model in evaluation mode, where each rank works alone: "
                    "set DistCAConfig(balance_evaluation=True) if all ranks evaluate together."
                )
            window = _effective(window, layout)
            return Work(Route.build(Plan.local(layout, window), 0, device), keep, window, False, Meter(self.meter))
        started = time.perf_counter()
        with self.group.reporting(f"measuring costs for micro-batch {self._planned + 1}"):
            cost = self._cost(query, key, value, window)
        announced = self._announce(local, cost)
        contexts = [int(row[_CONTEXT]) for row in announced]
        layout = _layout([row[_HEADER:].reshape(-1, 3) for row in announced], contexts, spans=local.spans)
        # Layers that are left whole hide nothing, whatever the settings are.
        plan = balance(layout, cost, replace(self.config, ping_pong=local.half > 0))
        self._agree(plan)
        waves = Waves.of(plan, cost.shape, self.config.tile, self.config.max_transient_bytes)
        self._warn_above_bound(waves)
        route = Route.build(plan, self.group.rank, device, waves)
        micro, meter = Micro.of(plan, cost, (time.perf_counter() - started) * 1e3), Meter(self.meter)
        self.history.planned(micro)
        self._last[window, local.chunk, local.half] = micro, meter
        name = f"micro-batch {self._planned}" + (f", nano-batch {local.half}" if local.half else "")
        return Work(route, keep, _effective(window, layout), True, meter, local.half, name=name)

    def attend(
        self,
        work: Work,
        module: torch.nn.Module,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKV: torch.Tensor,
        scores: Scores,
        sink_H: torch.Tensor | None = None,
        context: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Core attention of one layer for this rank's tokens, whose keys `context` is in front of."""
        group = self.group if work.collective else _ALONE
        place = f"layer {getattr(module, 'layer_idx', work.meter.calls)} of {work.name}"
        if group.data is not None:
            group = replace(group, data=group.data.at(place, 2 * len(work.route.waves)))
        reporting = partial(group.reporting, f"computing {place}")
        outputs = work.outputs.of(module) if module.training else None
        tracer = Tracer(self.trace, work.half, work.meter.calls + 1, q_THD.device)
        with reporting():
            server = AttentionServer(self._kernel(q_THD, v_TKV, scores), scores, work.meter, tracer, reporting)
            return core_attention(
                q_THD,
                k_TKD,
                v_TKV,
                route=work.route,
                group=group,
                server=server,
                context=context,
                sink_H=sink_H,
                outputs=outputs,
            )

    @contextmanager
    def reporting(self, training: bool, doing: str, *, alone: bool = False) -> Iterator[None]:
        """Name this rank in what is wrong with its batch, and tell the ranks that would wait for it."""
        group = self.group if self.takes_part(training, alone=alone) else _ALONE
        try:
            with group.reporting(f"{doing} for micro-batch {self._planned + 1}"):
                yield
        except (LayoutError, UnsupportedError) as error:
            if group.size == 1:
                raise
            raise type(error)(f"rank {group.ranks[group.rank]}: {error}") from error

    def _kernel(self, query: torch.Tensor, value: torch.Tensor, scores: Scores) -> Kernel:
        return select_kernel(self.config.kernel, query.device, query.dtype, query.shape[-1], value.shape[-1], scores)

    def _cost(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> CostModel:
        shape = AttentionShape(query.shape[1], key.shape[1], query.shape[-1], value.shape[-1], query.element_size())
        kind = query.device.type
        if (shape, kind) not in self._costs:
            source = self.config.cost_model
            if isinstance(source, CostModel):
                cost = replace(source, shape=shape)
            else:
                cost = CostModel.analytic(shape, device_type=kind, tile=self.config.tile)
            if source == "calibrated":
                kernel = self._kernel(query, value, Scores(1.0))
                cost = calibrate(cost, kernel, query.dtype, query.device, self.group)
            self._costs[shape, kind] = cost
        return replace(self._costs[shape, kind], window=window)

    def _announce(self, local: LocalDocuments, cost: CostModel) -> list[IntArray]:
        """Exchange documents; on the way, compare settings and collect what each rank measured in the last micro-batch."""
        self._planned += 1
        header = np.zeros(_HEADER, dtype=np.int64)
        header[_COUNT] = self._planned
        header[_AGREEMENT] = _fingerprint(self.config, cost)
        header[_EXCHANGES] = self.meter.dispatches + self.meter.returns
        header[_SPANS], header[_HALF], header[_CONTEXT] = local.spans, local.half, local.context > 0
        last = self._last.get((cost.window, local.chunk, local.half))
        if last is not None:
            meter = last[1]
            header[_NANOSECONDS], header[_BYTES] = int(meter.seconds * 1e9), meter.sent_bytes
        row = np.concatenate([header, local.rows.reshape(-1)])
        announced = self.group.gather(row, doing=f"planning micro-batch {self._planned}")
        heads = np.stack([row[:_HEADER] for row in announced])
        for column, what, remedy in (
            (_COUNT, "numbers of the micro-batch", "every rank must run the same number of training forwards"),
            (_AGREEMENT, "settings (DistCAConfig, attention heads and widths, version)", "give every rank the same ones"),
            (_SPANS, "ways of giving documents", "use the same collator on every rank"),
            (_HALF, "nano-batches (0 is a whole batch)", "give every rank the same model"),
            (_EXCHANGES, "numbers of exchanges up to here", "run the same layers forward and backward on every rank"),
        ):
            self._compare(heads[:, column], what, remedy)
        if last is not None:
            self.history.measured(last[0], heads[:, _NANOSECONDS] / 1e9, heads[:, _BYTES], last[1].calls)
        return announced

    def _agree(self, plan: Plan) -> None:
        """Plans come from equal inputs, but an exchange with unequal plans would hang: compare before using them."""
        digest = np.array([int(plan.digest[:15], 16)], dtype=np.int64)
        digests = self.group.gather(digest, doing=f"comparing plans of micro-batch {self._planned}")
        self._compare(np.concatenate(digests), "plans for the same documents", "use one version of hf_distca and numpy")

    def _warn_above_bound(self, waves: Waves) -> None:
        """A document over ranks needs its keys wherever its rows are. Exact anyway, and most likely it fits: no error."""
        bound, rank = self.config.max_transient_bytes, self.group.rank
        if bound is not None and waves.bytes is not None and waves.bytes[rank] > bound:
            warnings.warn(
                f"rank {self.group.ranks[rank]} needs about {waves.bytes[rank]} transient bytes for a tile of rows of a document "
                f"that spans ranks, more than max_transient_bytes={bound}; it is computed in {waves.count} waves of that size. "
                "Raise the bound, or cut documents so that each lies on one rank.",
                stacklevel=2,
            )

    def _compare(self, seen: IntArray, what: str, remedy: str) -> None:
        if (seen == seen[0]).all():
            return
        values = ", ".join(f"rank {rank}: {value}" for rank, value in zip(self.group.ranks, seen.tolist(), strict=True))
        raise DistCADesyncError(f"ranks have different {what} in micro-batch {self._planned}: {values}; {remedy}.")


def _effective(window: int | None, layout: Layout) -> int | None:
    """The window, if any document is longer than it."""
    return None if window is None or window >= layout.longest else window


def _layout(ranks: list[IntArray], contexts: list[int], *, spans: bool) -> Layout:
    """The layout of announced rows; the first row of a rank with context is the beginning of the document in its second row."""
    if not spans and not any(contexts):
        return Layout.from_lengths([rows[:, 2].tolist() for rows in ranks])
    if not spans:
        first = np.cumsum([0, *(len(rows) for rows in ranks)])
        numbered = [
            [(base + max(place, context), start, length) for place, (_, start, length) in enumerate(rows.tolist())]
            for base, rows, context in zip(first.tolist(), ranks, contexts, strict=False)
        ]
        return Layout.from_segments(numbered, contexts)
    if any((rows[:, 0] >= 0).any() for rows in ranks):
        return Layout.from_segments([[tuple(row) for row in rows.tolist()] for rows in ranks])
    return Layout.from_runs([list(map(tuple, rows[:, 1:].tolist())) for rows in ranks])


@lru_cache
def _fingerprint(config: DistCAConfig, cost: CostModel) -> int:
    text = f"{config} {cost.shape} {cost} {version('hf-distca')}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


_session: Session | None = None


def current_session() -> Session:
    """The session of this process, made with default settings at the first use."""
    global _session
    if _session is None:
        _session = Session(DistCAConfig())
    return _session


def configure(config: DistCAConfig | None = None, *, group: dist.ProcessGroup | DeviceMesh | None = None) -> DistCAConfig:
    """Set how this process runs distca, once, before training. Every rank must give the same settings.

    Args:
        config: settings; the defaults if None.
        group: the ranks that share core attention, as a process group or a device mesh. By default the data-parallel ranks of
            the mesh of a model loaded with transformers' `DistributedConfig`, or of accelerate's device mesh, else all ranks.

    Returns:
        The settings now in use.
    """
    global _session
    _session = Session(config or DistCAConfig(), group)
    return _session.config


@contextmanager
def balancing(enabled: bool) -> Iterator[None]:
    """Switch balancing on or off for the forwards inside. All ranks must enter and leave it at the same time."""
    session = current_session()
    before = session.config
    session.config = replace(before, balance=enabled)
    try:
        yield
    finally:
        session.config = before


def attention_seconds() -> float:
    """Seconds this rank has spent in attention kernels, forward and backward, for itself and as a server, since `configure`.

    On CUDA those of finished kernels: synchronise first for an exact figure.
    """
    return current_session().meter.seconds
