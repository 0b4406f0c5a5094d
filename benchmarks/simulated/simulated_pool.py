"""A pool of attention servers: ranks that own no tokens and serve those that train, and other
groups of unlike ranks.

The ranks that train hold all tokens. Servers compute attention only. In one stream they are idle
while linear layers run; in ping-pong they compute the attention of one nano-batch beside the linear
layers of the other. So a micro-batch may take longer than its busiest rank computes, and is
simulated layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal, deal_nano_batches
from hf_distca.schedule.layout import FloatArray, IntArray, Layout
from hf_distca.schedule.ranks import Ranks
from simulator.disaggregated import Moves, compute_moves
from simulator.predict import estimate_linear_seconds
from simulator.setting import TILE, Setting
from simulator.work import Candidate, Directions, MicroBatchWork, combine_layers

# In ping-pong, parts of the seconds of a rank's own linear layers that plans count as its work.
# With none, all ranks end their attention together, as in training. All of them would be right if
# servers never waited. In 24 pools of 64 devices, none alone took up to 20 % longer than the best
# of these, and all of them 3 to 90 % longer.
COUNTED = (0.0, 0.25, 0.5, 0.75)
_SAME = 1e-3  # part of a speed that makes no difference
# Of a rank whose linear layers leave no time for attention; a plan wants speeds above 0.
_LEAST_SPEED = 0.02


class Servers(NamedTuple):
    """Devices of a setting that own no tokens and only serve: equally many of each node, or nodes
    of their own.
    """

    count: int
    each_node: bool = False

    def training(self, setting: Setting) -> npt.NDArray[np.bool_]:
        """True for ranks of the attention group that train, shape (group,).

        Raises:
            ValueError: if so many devices cannot be laid out so.
        """
        nodes, per_node = (
            -(-setting.ranks // setting.ranks_per_node),
            max(setting.ranks_per_node, setting.tensor),
        )
        unit = (
            setting.tensor * nodes if self.each_node else setting.tensor if nodes == 1 else per_node
        )
        if (
            self.count % unit
            or not 0 < self.count < setting.ranks
            or setting.shared < setting.group
            or setting.stages > 1
        ):
            raise ValueError(
                f"{self} of {setting.ranks} ranks: there must be a multiple of {unit}, somebody has"
                " to train, and all are one attention group without stages, of at most"
                f" {setting.shared} ranks."
            )
        ranks, servers, inside = (
            np.arange(setting.group),
            self.count // setting.tensor,
            setting.nodes.per_node,
        )
        if self.each_node and inside is not None:
            return np.asarray(ranks % inside < inside - servers * inside // setting.group)
        return np.asarray(ranks < setting.group - servers)


@dataclass(frozen=True)
class Devices:
    """Properties of the ranks of an attention group; arrays have shape (ranks,).

    Attributes:
        tokens: tokens of each, in proportion to the others; 0 for a server.
        linear_speed, attention_speed: speeds of each, 1 for the hardware of the setting.
    """

    tokens: FloatArray
    linear_speed: FloatArray
    attention_speed: FloatArray

    @classmethod
    def all_training(cls, setting: Setting) -> Devices:
        """Make equally fast devices that hold equally many tokens."""
        ones = np.ones(setting.group)
        return cls(ones, ones, ones)

    @classmethod
    def with_servers(cls, servers: Servers, setting: Setting) -> Devices:
        """Make equally fast devices of which some hold no tokens."""
        return replace(
            cls.all_training(setting), tokens=servers.training(setting).astype(np.float64)
        )

    @property
    def trains(self) -> IntArray:
        """Ranks that hold tokens."""
        return np.flatnonzero(self.tokens)


def pooled(
    devices_of: Callable[[Setting], Devices],
    ping_pong: bool,
    setting: Setting,
    batches: Sequence[IntArray],
    counted: Sequence[float] = COUNTED,
) -> list[Candidate]:
    """Make a candidate for each part of the training ranks' linear layers that plans
    count; whole documents are dealt to these ranks.
    """
    devices = devices_of(setting)
    if not ping_pong or np.ptp(devices.tokens / devices.linear_speed) == 0:
        counted = (0.0,)
    holders = replace(setting, ranks=len(devices.trains) * setting.tensor)
    placements = [_dealt(setting, devices, lengths, ping_pong) for lengths in batches]
    return [
        Candidate(
            [_work(setting, devices, placement, part) for placement in placements], holders=holders
        )
        for part in counted
    ]


def _dealt(
    setting: Setting, devices: Devices, lengths: IntArray, ping_pong: bool
) -> tuple[Layout, ...]:
    """Deal documents to the ranks that train, in layouts of all ranks."""
    cost, trains = setting.dealing_cost, devices.trains
    ends = (
        (lengths.sum() * np.cumsum(devices.tokens[trains]) / devices.tokens.sum())
        .round()
        .astype(np.int64)
    )
    tokens = np.diff(ends, prepend=0).tolist()
    nodes = setting.nodes.without_irrelevant_nodes(cost).per_node
    if nodes is not None:
        nodes = int((trains // nodes == trains[0] // nodes).sum())
    if ping_pong:
        layouts = deal_nano_batches(
            lengths, len(trains), tokens, cost, tile=TILE, ranks_per_node=nodes
        )
    else:
        layouts = (deal(lengths, len(trains), tokens, cost, tile=TILE, ranks_per_node=nodes),)  # type: ignore[assignment]
    bounds = np.searchsorted(trains, np.arange(len(devices.tokens) + 1))
    return tuple(
        Layout(layout.document, layout.start, layout.length, layout.offsets[bounds])
        for layout in layouts
    )


def _work(
    setting: Setting, devices: Devices, placement: Sequence[Layout], counted: float
) -> MicroBatchWork:
    layers, config = setting.model.attending, DistCAConfig(ping_pong=len(placement) > 1)
    tokens = [layout.query_tokens.astype(np.float64) for layout in placement]
    linear = [
        estimate_linear_seconds(setting, count) / layers / devices.linear_speed for count in tokens
    ]

    def of_layer(cost: CostModel) -> MicroBatchWork:
        nodes, moves = setting.nodes.without_irrelevant_nodes(cost), []
        for layout, beside in zip(placement, linear, strict=True):
            ranks = _time_left(
                devices,
                beside.sum(axis=0) * counted,
                float(cost.estimate_seconds(layout.length, layout.end).sum()),
            )
            plan = balance(layout, cost, config, replace(nodes, speeds=ranks.speeds))
            moves.append(compute_moves(setting, plan, cost, nodes))
        attention, exposed, idle = _followed(devices, linear, moves, layers)
        return MicroBatchWork(
            np.asarray(sum(tokens)),
            *(attention, exposed, np.asarray(sum(layer.wire for layer in moves))),
            np.max([layer.received for layer in moves], axis=0),
            pairs=sum(layer.pairs for layer in moves),
            meeting=len(devices.tokens),
            between=sum(layer.between for layer in moves),
            idle=idle,
            linear_speed=devices.linear_speed,
        )

    return combine_layers(setting, of_layer)


def _time_left(devices: Devices, linear: FloatArray, attention: float) -> Ranks:
    """Make ranks that a plan treats as slower, the less time their own linear layers leave for
    attention.

    All ranks should end together, after s seconds. A rank with l seconds of linear layers does so
    with its attention, too, if the plan takes its speed for (s - l) / s of the true one.

    Args:
        devices: properties of the ranks.
        linear: seconds of each rank's linear layers, as far as they count.
        attention: seconds of the attention of all ranks together, at speed 1.
    """
    seconds = (float((linear * devices.attention_speed).sum()) + attention) / float(
        devices.attention_speed.sum()
    )
    speeds = np.maximum(1 - linear / max(seconds, 1e-300), _LEAST_SPEED) * devices.attention_speed
    return Ranks.from_speeds(
        None if np.ptp(speeds) < _SAME * speeds.max() else speeds / speeds.mean()
    )


def _followed(
    devices: Devices, linear: Sequence[Directions], moves: Sequence[Moves], layers: int
) -> tuple[Directions, Directions, Directions]:
    """Compute the seconds of a layer for attention, for waiting for messages, and without anything
    to do.

    The time of waiting for messages is their addition to the seconds of all.
    """
    attention = np.sum([layer.attention for layer in moves], axis=0) / devices.attention_speed
    exposed, idle = np.zeros((2, *attention.shape))
    for direction in (0, 1):
        turns = [
            Turn(
                seconds[direction],
                layer.attention[direction] / devices.attention_speed,
                layer.unblocked[direction] / devices.attention_speed * (len(moves) == 1),
                *(layer.dispatch[direction], layer.back[direction]),
            )
            for seconds, layer in zip(linear, moves, strict=True)
        ]
        # Nearly no time: a message that takes none at all is none, and nobody waits for who sends
        # it.
        at_once = [
            turn._replace(dispatch=turn.dispatch * 1e-9, back=turn.back * 1e-9) for turn in turns
        ]
        taken, without = (in_turns(some, layers) / layers for some in (turns, at_once))
        exposed[direction] = taken - without
        idle[direction] = without - attention[direction] - sum(turn.linear for turn in turns)
    return attention, exposed, idle


class Turn(NamedTuple):
    """Seconds of each rank in one direction of a layer, for a nano-batch, or for a whole
    micro-batch in one stream.
    """

    linear: FloatArray
    attention: FloatArray
    unblocked: FloatArray  # of the attention, what waits for no message
    dispatch: FloatArray
    back: FloatArray


def in_turns(turns: Sequence[Turn], layers: int) -> float:
    """Return the seconds of so many layers: linear layers of each nano-batch, then
    attention of each, and messages one after another.

    A message leaves when the last rank is ready to send, and linear layers wait for the outputs of
    the layer before. A server has no linear layers to wait for, and runs ahead.
    """
    free, wire = np.zeros((2, len(turns[0].linear)))
    returned = [free] * len(turns)
    for _ in range(layers):
        arrived = []
        for turn, back in zip(turns, returned, strict=True):
            owns = turn.linear > 0
            free = np.where(owns, np.maximum(free, back), free) + turn.linear
            wire, here = _sent(wire, free, turn.dispatch, float(free[owns].max(initial=0)))
            arrived.append(here)
        returned = []
        for turn, there in zip(turns, arrived, strict=True):
            free = np.maximum(free + turn.unblocked, there) + turn.attention - turn.unblocked
            wire, here = _sent(wire, free, turn.back, float(free.max()))
            returned.append(here)
    return float(np.max([free, *returned]))


def _sent(
    wire: FloatArray, free: FloatArray, seconds: FloatArray, last: float
) -> tuple[FloatArray, FloatArray]:
    """Return the times when each rank's wire is free again and its message there; without messages
    nobody waits.
    """
    if not seconds.any():
        return wire, free
    there = np.maximum(wire, last) + seconds
    return there, there
