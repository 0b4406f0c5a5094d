"""`Session`: what a process keeps between micro-batches: configuration, group, kernels, cost models, history.

Plans and routes are not among them; those live in the handle of their micro-batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_distca.agreement.announce import Kind
from hf_distca.agreement.documents import LocalDocuments
from hf_distca.agreement.planner import Planned, Planner
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError, UnsupportedError
from hf_distca.integration.handle import Work
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
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.plan import Plan
from hf_distca.schedule.waves import Waves

__all__ = ["Session", "attention_seconds", "balancing", "configure", "current_session"]

_ALONE = AttentionGroup()


class Session:
    """One process's side of core attention. Use `current_session`; `configure` makes a new one."""

    def __init__(self, config: DistCAConfig, members: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        self.config = config
        self.meter = Meter()
        self.planner = Planner(self.meter)
        self.trace: Trace | None = None
        self.started = time.perf_counter()
        self.given = members  # the group that the user gave, None if it is to be found
        self._members = members
        self._group: AttentionGroup | None = None
        self._world: object = None
        self._costs: dict[tuple[AttentionShape, str], CostModel] = {}

    @property
    def group(self) -> AttentionGroup:
        """The attention group; made at the first use, and again after torch.distributed starts or restarts."""
        world = dist.GroupMember.WORLD if dist.is_available() and dist.is_initialized() else None
        if self._group is None or world is not self._world:
            members = data_parallel_group(self._members) if isinstance(self._members, DeviceMesh) else self._members
            if members is None and world is not None:
                members = find_members()
            self._group = AttentionGroup.of(members, timeout_seconds=self.config.timeout_seconds)
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
        parts: Sequence[LocalDocuments],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        training: bool,
        alone: bool = False,
        window: int | None = None,
    ) -> list[Work]:
        """Plan a micro-batch for one kind of layer: together with the other ranks in training, alone otherwise.

        Args:
            parts: this rank's documents, whole or of both nano-batches.
            query, key, value: (batch, heads, length, width), for their shapes, dtype and device.
            training: whether the module is in training mode on this rank, and so on all.
            alone: whether this forward is one that the other ranks need not run, whatever the mode.
            window: keys that a row sees at most, None for all.

        Returns:
            The work of each part.
        """
        if not self.takes_part(training, alone=alone):
            return [self._work_alone(local, query.device, window, evaluating=alone or not training) for local in parts]
        with self.group.reporting(f"measuring costs for micro-batch {self.planner.next_number}"):
            cost = self._cost(query, key, value, window)
        kinds = [Kind(cost, local.chunk, local.half, self.config) for local in parts]
        plans = self.planner.plan(list(zip(parts, kinds, strict=True)), self.group)
        with self.reporting(training, "taking up a plan", alone=alone):
            return [self._work(local, planned, query.device) for local, planned in zip(parts, plans, strict=True)]

    def _work_alone(self, local: LocalDocuments, device: torch.device, window: int | None, *, evaluating: bool) -> Work:
        if local.spans and evaluating and (local.rows[:, 1] > 0).any():
            raise UnsupportedError(
                "a document that spans ranks met a model in evaluation mode, where each rank works alone: "
                "set DistCAConfig(balance_evaluation=True) if all ranks evaluate together."
            )
        layout = Layout.from_lengths([local.rows[:, 2].tolist()])
        window = _effective(window, layout)
        return Work(Route.build(Plan.local(layout, window), 0, device), _keep(local, device), window, False, Meter(self.meter))

    def _work(self, local: LocalDocuments, planned: Planned, device: torch.device) -> Work:
        meter = self.planner.use(planned, local)
        plan, cost = planned.plan, planned.kind.cost
        waves = Waves.of(plan, cost.shape, self.config.tile, self.config.max_transient_bytes)
        self._warn_above_bound(waves)
        route = Route.build(plan, self.group.rank, device, waves)
        name = f"micro-batch {self.planner.number}" + (f", nano-batch {local.half}" if local.half else "")
        window = _effective(cost.window, plan.layout)
        return Work(route, _keep(local, device), window, True, meter, local.half, name=name)

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
            with group.reporting(f"{doing} for micro-batch {self.planner.next_number}"):
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


def _effective(window: int | None, layout: Layout) -> int | None:
    """The window, if any document is longer than it."""
    return None if window is None or window >= layout.longest else window


def _keep(local: LocalDocuments, device: torch.device) -> torch.Tensor | None:
    return None if local.keep is None else torch.from_numpy(local.keep).to(device)


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

    Raises:
        ConfigError: if `config` is no `DistCAConfig`.
    """
    global _session
    if config is not None and not isinstance(config, DistCAConfig):
        raise ConfigError(f"configure() got {config!r}: give it a DistCAConfig, such as DistCAConfig(tolerance=0.02).")
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
