"""`Session`: state that a process keeps between micro-batches:
configuration, group, kernels, cost models, history.

Plans and routes are not among them; those live in the handle of their micro-batch.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol, get_args

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents
from hf_distca.agreement.planned import Planned
from hf_distca.agreement.planner import Planner, current_world
from hf_distca.borrowed import loaded_mesh
from hf_distca.config import DistCAConfig, KernelName
from hf_distca.errors import ConfigError, LayoutError, UnsupportedError
from hf_distca.integration.families import known_cost, source_of_rates
from hf_distca.integration.handle import AttentionHandle, Work
from hf_distca.integration.processes import check_pool, data_parallel_group, find_members, said_if_long, size_of_groups
from hf_distca.integration.work_alone import ALONE, keep_of, work_alone
from hf_distca.kernels import Case, Kernel, Scores, select_kernel
from hf_distca.measure.calibrate import calibrate, fastest
from hf_distca.measure.shipped import shipped_profile
from hf_distca.measure.timeline import Trace
from hf_distca.runtime.call import AttentionServer, Call, Inputs
from hf_distca.runtime.core_attention import core_attention
from hf_distca.runtime.group import AttentionGroup, Members
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.waves import Waves

__all__ = ["Session", "balancing", "configure", "current_session"]


class Elsewhere(Protocol):
    """Substitute of a session while a schedule of pipeline stages runs forwards."""

    def uses_nano_batches(self, handle: AttentionHandle) -> bool:
        """See `Session.uses_nano_batches`; if this returns True, the handle has its documents."""

    def work_for(self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey) -> Work:
        """See `Session.work_for`."""


class ServerPool(Protocol):
    """Servers that take part in the attention of all ranks."""

    def group(self, members: dist.ProcessGroup | Members | None, timeout_seconds: float | None) -> AttentionGroup:
        """Return the group of these ranks, all of which call this at
        the same point, and the servers.
        """

    def without(self, leaving: Sequence[int]) -> AttentionGroup:
        """Return the group of the others, once servers of these indices in it have left."""


class Session:
    """State of core attention in one process.

    Use `current_session`; `configure` makes a new one.

    Attributes:
        meter: counts the work of the process.
        planner: the plans of its micro-batches, the settings they are made under, and the figures.
        trace: records a timeline; None for no timeline.
        started: time at which the session was made, by `time.perf_counter`.
        given: the group that the user gave; None to find it.
        kernels: names of the kernels that attention ran in, in the order of their first use.
        summarized: whether the summary of the run was printed.
        elsewhere: its substitute while a schedule of pipeline stages runs forwards.
        times_alone: whether kernels are timed on CUDA also if no other rank takes part: only once
            figures were read.
    """

    pool: ClassVar[ServerPool | None] = None  # servers that take part, for all sessions of the process

    def __init__(self, config: DistCAConfig, members: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        self.meter = Meter()
        self.planner = Planner(config, self.meter)
        self.trace: Trace | None = None
        self.started = time.perf_counter()
        self.given = members
        self.kernels: dict[str, None] = {}
        self.summarized = self.times_alone = False
        self._fastest: dict[tuple[torch.dtype, tuple[int, int]], str | None] = {}
        self.elsewhere: Elsewhere | None = None
        self._members = members
        self._group: AttentionGroup | None = None
        self._trainers: AttentionGroup | None = None  # once they were asked for
        self._world: object = None

    @property
    def config(self) -> DistCAConfig:
        """Settings in use."""
        return self.planner.config

    @config.setter
    def config(self, config: DistCAConfig) -> None:
        self.planner.config = config
        if self._group is not None:
            self._group.notify_servers("configure", config=config)

    @property
    def group(self) -> AttentionGroup:
        """Attention group; made at the first use, and again after torch.distributed
        starts or restarts. Making it is collective.
        """
        world = current_world()
        if self._group is None or world is not self._world:
            members = data_parallel_group(self._members) if isinstance(self._members, DeviceMesh) else self._members
            if members is None and world is not None:
                members = find_members()
            with said_if_long("making the attention group, which waits for all its ranks,"):
                size = None if world is None else size_of_groups(members, self.config)
                if self.pool is None:
                    self._group = AttentionGroup.of(members, timeout_seconds=self.config.timeout_seconds, size=size)
                else:
                    check_pool(members, size)
                    group = self.pool.group(members, self.config.timeout_seconds)
                    self._group = replace(group, session=group.number(self))
            self._group.notify_servers("begin_session", config=self.config)
            self._trainers, self._world = None, world
        return self._group

    @property
    def trainers(self) -> AttentionGroup:
        """Ranks of the attention group that hold tokens: all but the servers of a pool.

        Making the group is collective.
        """
        group = self.group
        if group.holds is None:
            return group
        if self._trainers is None:
            self._trainers = AttentionGroup.of(timeout_seconds=self.config.timeout_seconds)
        return self._trainers

    def take_group(self, group: AttentionGroup) -> None:
        """Join a group that was made elsewhere, and restart counting."""
        self._group, self._world = group, current_world()
        self.planner.begin_anew()

    @property
    def ranks(self) -> int:
        """Number of ranks of the attention group, also after
        torch.distributed ended; 1 if it was not made.
        """
        return 1 if self._group is None else self._group.size

    @property
    def nodes(self) -> int:
        """Number of nodes of the ranks; 0 if it is not known, as if
        nodes have different numbers of ranks.
        """
        group = self._group
        if group is None or group.size == 1:
            return 1
        return 0 if group.per_node is None else group.size // group.per_node

    @property
    def is_first(self) -> bool:
        """True if this is rank 0 of all ranks, the only one to report
        facts that are the same everywhere.
        """
        if self._group is None:
            return current_world() is None or dist.get_rank() == 0
        return self._group.ranks[self._group.rank] == 0

    def gather(self) -> None:
        """Gather the measurements up to here, on all ranks of the group. Collective."""
        group = self._group
        if group is not None and group.size > 1 and not group.has_left and (group.holds is not None or dist.is_initialized()):
            self.planner.progress.gather(group)

    def look_for_mesh(self, models: Iterator[PreTrainedModel]) -> None:
        """Take the ranks of the attention group from the first model with a mesh,
        if they are neither given nor found yet.
        """
        if self._members is None and self._group is None:
            self._members = next((mesh for model in models if (mesh := loaded_mesh(model)) is not None), None)

    def group_for(self, handle: AttentionHandle, training: bool) -> AttentionGroup:
        """Return the ranks that take part in a forward: this one
        alone if the others need not run it.
        """
        if handle.group is None:
            # Making the group needs all ranks: a rank that evaluates or generates alone must not ask for it.
            together = not handle.alone and (training or self.config.balance_evaluation)
            if together and self.pool is not None and (leaving := self.planner.progress.leaving):
                self.gather()
                self.take_group(replace(self.pool.without(leaving), session=self.group.session))
            handle.group = self.group if together else ALONE
        return handle.group

    def is_collective(self, handle: AttentionHandle, training: bool) -> bool:
        """Return whether other ranks take part in a forward."""
        return self.group_for(handle, training).size > 1

    def uses_nano_batches(self, handle: AttentionHandle, training: bool) -> bool:
        """Return whether layers run as two nano-batches."""
        if self.elsewhere is not None:
            return self.elsewhere.uses_nano_batches(handle)
        return self.config.ping_pong and self.is_collective(handle, training)

    def documents(self, handle: AttentionHandle, arguments: Mapping[str, Any], training: bool) -> Documents:
        """Return the documents of a batch, from the keyword
        arguments of a layer or of attention.
        """
        if handle.documents is not None:
            return handle.documents
        group = self.group_for(handle, training)
        with self._reporting(group, "reading documents") if group.size > 1 else nullcontext():
            return handle.read(arguments, span_ranks=self.config.documents_span_ranks, training=training)

    def work_for(
        self, handle: AttentionHandle, arguments: Mapping[str, Any], query: torch.Tensor, key: PlanKey, *, training: bool
    ) -> Work:
        """Plan one kind of layer of a micro-batch, with the other ranks or
        alone, and the kinds that are planned with it.

        Args:
            handle: handle of the micro-batch.
            arguments: keyword arguments of attention, which define the documents.
            query: (batch, heads, length, width) in the dtype that attention computes in.
            key: key of the plan.
            training: whether the module is in training mode on this rank, and so on all.
        """
        if self.elsewhere is not None:
            return self.elsewhere.work_for(handle, arguments, query, key)
        group = self.group_for(handle, training)
        handles = [handle] if handle.second is None else [handle, handle.second]  # both nano-batches, so that ranks meet once
        requests = [(self.documents(part, arguments, training), key._replace(nano=part.nano)) for part in handles]
        if group.size == 1:
            # To time a layer on CUDA, the host records four events.
            meter = Meter(self.meter, timed=self.times_alone or key.device != "cuda")
            alone, pairs = handle.alone or not training, zip(handles, requests, strict=True)
            works = [work_alone(part, which, query.device, meter, evaluating=alone) for part, (_, which) in pairs]
        else:
            with self._reporting(group, "measuring costs"):
                self.learn_cost(key, query, group)
            # The first plan after an installation compiles loops of the scheduler.
            said = said_if_long("making the first plan") if self.planner.progress.next_number == 1 else nullcontext()
            with self._reporting(group, "planning"), said:
                plans = self.planner.plan(requests, group)
            with self._reporting(group, "taking up a plan"):
                for part, planned in zip(handles, plans, strict=True):
                    part.check(planned.plan.layout, key.window)
                known = zip(requests, plans, strict=True)
                works = [self.use_plan(documents, planned, group, query.device) for (documents, _), planned in known]
        for part, (_, which), work in zip(handles, requests, works, strict=True):
            part.work[which] = work if part.mask.recomputes and training else replace(work, outputs=None)
        return handle.work[requests[0][1]]

    def use_plan(self, documents: Documents, planned: Planned, group: AttentionGroup, device: torch.device) -> Work:
        """Use a plan for the current micro-batch, which has these documents on this rank."""
        meter, nano = self.planner.progress.use(planned, documents), planned.key.nano
        plan, config = planned.plan, self.config
        waves = Waves.of(plan, planned.key.shape, config.tile, config.max_transient_bytes, config.head_groups)
        self._warn_above_bound(waves, group)
        route = Route.build(plan, group.rank, waves)
        name = f"micro-batch {self.planner.progress.number}" + (f", nano-batch {nano}" if nano else "")
        name += f" ({planned.source}, plan {plan.digest[:8]})" if planned.source else ""
        serial = group.number(route)
        group.notify_servers("use_plan", plan=planned.serial, work=serial)
        return Work(group, route, keep_of(documents, device), plan.window, meter, nano, OutputStore(), name, serial)

    def server(self, work: Work, query: torch.Tensor, shape: AttentionShape, scores: Scores) -> AttentionServer:
        """Make a server for the tasks of layers of this shape and these scores,
        which compute in the dtype of `query`.
        """
        with work.group.reporting(f"choosing a kernel for {work.name}"):
            kernel = self.kernel(query, (shape.head_dim, shape.value_head_dim), scores, shape.heads_per_key_head)
            return AttentionServer(kernel, scores, work.meter)

    def attend(self, work: Work, server: AttentionServer, module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
        """Compute core attention of one layer for this rank's tokens;
        `server` runs the tasks of all layers like it.
        """
        group, route, number = work.group, work.route, next(work.numbers)
        outputs = None if work.outputs is None else work.outputs.of(module, inputs)
        if group.monitor is None and self.trace is None:  # nobody waits for this rank, and nobody is told
            return core_attention(inputs, Call(route, group, server, outputs))
        group.raise_pending()
        place = f"layer {getattr(module, 'layer_idx', number)} of {work.name}"
        meter, layer = work.meter if self.trace is None else self.trace.meter(work.meter, work.nano, number + 1), None
        server = AttentionServer(server.kernel, server.scores, meter, partial(group.reporting, f"computing {place}"))
        group = group.at(place, route.forward_exchanges) if route.exchanges else group
        if group.lead is not None:
            layer = {"work": work.serial, "place": place, "dtype": inputs.q_THD.dtype}
        try:
            return core_attention(inputs, Call(route, group, server, outputs, layer))
        except Exception:
            with server.reporting():
                raise

    @contextmanager
    def _reporting(self, group: AttentionGroup, doing: str) -> Iterator[None]:
        """Add this rank's name to errors in its batch, and report them
        to the ranks that would wait for it.
        """
        try:
            with group.reporting(f"{doing} for micro-batch {self.planner.progress.next_number}"):
                yield
        except (LayoutError, UnsupportedError) as error:
            if group.size == 1:
                raise
            raise type(error)(f"rank {group.ranks[group.rank]}: {error}") from error

    def kernel(self, query: torch.Tensor, widths: tuple[int, int], scores: Scores, ratio: int) -> Kernel:
        """Select the kernel for the device and dtype of a tensor, widths of keys
        and values, and query heads a key head.
        """
        first = self._fastest.get((query.dtype, widths))
        kernel = select_kernel(self.config.kernel, Case(query.device, query.dtype, *widths, scores, ratio), first=first)
        self.kernels[kernel.name] = None
        return kernel

    def learn_cost(self, key: PlanKey, query: torch.Tensor, group: AttentionGroup) -> None:
        """Make the cost model of a shape, at its first layer; all ranks of
        the group at the same point. Collective.
        """
        group.notify_servers("learn_cost", key=key, dtype=query.dtype)
        self.planner.progress.costs.dtypes[key.shape, key.device] = str(query.dtype)
        if (key.shape, key.device) in self.planner.progress.costs:
            return
        cost = known_cost(key._replace(window=None), self.config)
        widths, source = (key.shape.head_dim, key.shape.value_head_dim), source_of_rates(self.config)
        if source == "analytic" and query.device.type == "cuda":
            kernel = self.kernel(query, widths, Scores(1.0), key.shape.heads_per_key_head)
            if (profile := shipped_profile(query.device, kernel, group)) is not None:
                cost = profile.make_cost_model(key.shape, tile=self.config.tile)
        if source == "calibrated":
            if self.config.kernel == "auto" and key.device == "cuda":
                with said_if_long("comparing attention kernels before the first plan"):
                    names = get_args(KernelName)
                    self._fastest[query.dtype, widths] = fastest(key.shape, names, query.dtype, query.device, group)
            kernel = self.kernel(query, widths, Scores(1.0), key.shape.heads_per_key_head)
            with said_if_long(f"timing the attention kernel {kernel.name!r} before the first plan"):
                cost = calibrate(cost, kernel, query.dtype, query.device, group)
        self.planner.progress.costs[key.shape, key.device] = cost

    def _warn_above_bound(self, waves: Waves, group: AttentionGroup) -> None:
        """Warn if a document over ranks needs more memory than the bound; it is
        computed exactly, and most likely fits.
        """
        bound, rank = self.config.max_transient_bytes, group.rank
        if bound is not None and waves.bytes is not None and waves.bytes[rank] > bound:
            warnings.warn(
                f"rank {group.ranks[rank]} needs about {waves.bytes[rank]} transient bytes for a tile of rows of a document "
                f"that spans ranks, more than max_transient_bytes={bound}; it is computed in {waves.count} waves of that size. "
                "Raise the bound, or cut documents so that each lies on one rank.",
                stacklevel=2,
            )


_configured: Session | None = None  # by `configure`, or with the defaults
_session: Session | None = None  # in use: that one, or one of a callback with settings of its own


def current_session() -> Session:
    """Return the session of this process, made with default settings at the first use."""
    return _session or use_session()


def use_session(config: DistCAConfig | None = None, group: dist.ProcessGroup | DeviceMesh | None = None) -> Session:
    """Make a session with these settings the current one: the session of a
    callback, which no other callback inherits.

    Args:
        config, group: see `configure`, which also supplies a missing one; without both, use the
            session that `configure` made.
    """
    global _configured, _session
    if _configured is None:
        _configured = Session(DistCAConfig())
    base = _configured
    if config is None and group is None:
        _session = base
    else:
        _session = Session(config or base.config, base.given if group is None else group)
    return _session


def configure(
    config: DistCAConfig | None = None, *, group: dist.ProcessGroup | DeviceMesh | None = None, instead_of: str | None = None
) -> DistCAConfig:
    """Configure distca in this process, once, before training.

    Every rank must give the same settings.

    Args:
        config: settings; the defaults if None.
        group: the ranks that share core attention, as a process group or a device mesh. By default
            the data-parallel ranks of the mesh of a model loaded with transformers'
            `DistributedConfig`, or of accelerate's device mesh, else all ranks.
        instead_of: "flash_attention_2", "flash_attention_3", "flash_attention_4" or "sdpa", for
            trainers that take only names they know: from now on, models that this process loads
            with this attention get distca.

    Returns:
        The settings now in use.

    Raises:
        ConfigError: if `config` is not a `DistCAConfig`, or `group` neither a process group nor a
            device mesh.
        UnsupportedError: if `instead_of` is another name, or a package has put its own function in
            its place.
    """
    global _configured
    if config is not None and not isinstance(config, DistCAConfig):
        raise ConfigError(f"configure() got {config!r}: give it a DistCAConfig, such as DistCAConfig(tolerance=0.02).")
    if group is not None and not isinstance(group, (dist.ProcessGroup, DeviceMesh)):
        raise ConfigError(f"group={group!r}: give it a process group (torch.distributed.new_group), a mesh, or leave it out.")
    if instead_of is not None:
        from hf_distca.integration.loading import stand_in

        stand_in(instead_of)
    _configured = Session(config or DistCAConfig(), group)
    return use_session().config


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
