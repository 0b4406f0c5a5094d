"""`Setting`: model, devices, and arrangement of ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.ranks import Ranks
from simulator.hardware import Hardware
from simulator.model_shape import ModelShape

Checkpointing = Literal["none", "selective", "full"]
Sharding = Literal["fsdp", "zero1", "ddp"]
TILE = DistCAConfig().tile  # query rows of a kernel tile
_MOST_RANKS = 65536
MOST_TOKENS = 2**28


@dataclass(frozen=True)
class Setting:
    """A simulated setting: a step of `micro_batches` micro-batches on `ranks` devices.

    Attributes:
        model, hardware: the model and the device that runs it.
        ranks: number of devices.
        tokens_per_rank: tokens of a micro-batch on a rank. All ranks of a tensor-parallel group
            hold the same tokens.
        tensor, stages: tensor-parallel degree and pipeline stages. The attention group has
            ranks / (tensor * stages) ranks, its `group`.
        micro_batches: micro-batches of a step.
        ranks_per_node: devices that share a fast link.
        sharding: ``"fsdp"`` shards weights, gradients and the optimizer's state over the attention
            group, ``"zero1"`` only the optimizer's state, ``"ddp"`` nothing.
        checkpointing: ``"full"`` repeats a layer's forward in backward, attention included, as in
            transformers; ``"selective"`` keeps the outputs of attention, as hf-distca always does.
        profile: rates of attention and exchange measured elsewhere, instead of the hardware's.
        offload: whether tensors that checkpointing keeps wait in the host's memory.
        loss_tokens: tokens whose logits exist at a time; None for all tokens.
        fused: whether norms and gated activations are single kernels, as in Liger and Megatron but
            not in transformers.
    """

    model: ModelShape
    hardware: Hardware
    ranks: int
    tokens_per_rank: int
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1
    ranks_per_node: int = 8
    sharding: Sharding = "fsdp"
    checkpointing: Checkpointing = "none"
    profile: CostModel | None = None
    offload: bool = False
    loss_tokens: int | None = 4096
    fused: bool = True

    def __post_init__(self) -> None:
        for name, most in (
            ("ranks", _MOST_RANKS),
            ("tokens_per_rank", MOST_TOKENS),
            ("tensor", _MOST_RANKS),
            ("stages", self.model.layers),
            ("micro_batches", 4096),
            ("ranks_per_node", _MOST_RANKS),
        ):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ConfigError(f"{name}={value!r} must be a whole number from 1 to {most}.")
        for is_wrong, text in (
            (
                self.ranks % (self.tensor * self.stages),
                f"ranks={self.ranks} must be a multiple of tensor * stages (--tp, --pp) ="
                f" {self.tensor} * {self.stages}: what is left shares core attention.",
            ),
            (
                self.model.query_heads % self.tensor,
                f"tensor={self.tensor} must divide the {self.model.query_heads} query heads of"
                f" {self.model.name}.",
            ),
            (
                self.offload and self.checkpointing == "none",
                "offload=True moves what checkpointing keeps, and checkpointing='none' keeps"
                " nothing.",
            ),
            (
                self.model.layers % self.stages,
                f"stages={self.stages} must divide the {self.model.layers} layers of"
                f" {self.model.name}.",
            ),
        ):
            if is_wrong:
                raise ConfigError(text)

    @property
    def group(self) -> int:
        """Number of ranks of the attention group, which all have different tokens: data-parallel
        and context-parallel ranks together.
        """
        return self.ranks // (self.tensor * self.stages)

    @property
    def shared(self) -> int:
        """Number of ranks that share core attention under hf-distca: training splits large groups.

        With pipeline stages, all ranks are one group.
        """
        return self.group if self.stages > 1 else DistCAConfig().group_ranks(self.group)

    @property
    def nodes(self) -> Ranks:
        """Nodes of the ranks that share core attention, as in training."""
        per_node = min(self.ranks_per_node // self.tensor, self.shared)
        return Ranks(per_node=per_node if per_node > 1 and self.shared % per_node == 0 else None)

    @property
    def dealing_cost(self) -> CostModel:
        """Cost model to deal documents: that of the layers whose rows see the most keys."""
        return self.make_cost_model(None if None in dict(self.model.kinds) else self.model.window)

    @property
    def tokens(self) -> int:
        """Number of tokens of one micro-batch of the attention group."""
        return self.group * self.tokens_per_rank

    @property
    def stage_layers(self) -> int:
        return self.model.layers // self.stages

    @property
    def rank_parameters(self) -> float:
        """Number of weights of a rank before sharding."""
        return self.model.parameters / (self.tensor * self.stages)

    @cached_property
    def shape(self) -> AttentionShape:
        """Shape of core attention on one rank of a tensor-parallel group."""
        model = self.model
        heads = model.query_heads // self.tensor
        keys = max(model.key_value_heads // self.tensor, 1)
        if heads % keys:
            raise ConfigError(
                f"tensor={self.tensor} leaves {heads} query and {keys} key/value heads: choose a"
                " divisor of both."
            )
        return AttentionShape(
            heads, keys, model.head_dim, model.head_dim, self.hardware.element_bytes
        )

    def make_cost_model(self, window: int | None = None) -> CostModel:
        """Make the cost model for the scheduler."""
        if self.profile is not None:
            return replace(self.profile, shape=self.shape, tile=TILE, window=window)
        hardware = self.hardware
        return CostModel(
            self.shape,
            hardware.forward,
            hardware.backward,
            hardware.link_rate,
            hardware.exchange_seconds,
            TILE,
            hardware.name,
            window,
            node_bytes_per_second=hardware.node_rate,
            peer_seconds=hardware.peer_seconds,
        )
