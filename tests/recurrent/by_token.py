"""Recurrent layers over one document, token by token from the formulas: a slow reference."""

from __future__ import annotations

import torch

from hf_distca.hybrids.carryover import RuleOutputs
from hf_distca.hybrids.delta_rule import DeltaInputs
from hf_distca.hybrids.state_space import ScanInputs


def delta_rule_by_token(inputs: DeltaInputs, state: torch.Tensor | None = None) -> RuleOutputs:
    """Compute outputs and the last state; `state` is the first one, (1, H, K, V), or zeros."""
    heads, width = inputs.value.shape[2], inputs.key.shape[3]
    query, key = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in inputs[:2])
    decay = inputs.decay.exp() if inputs.decay.dim() == 4 else inputs.decay.exp()[..., None]
    state = key.new_zeros((1, heads, width, inputs.value.shape[3])) if state is None else state
    outputs = []
    for token in range(inputs.value.shape[1]):
        state = decay[:, token, ..., None] * state
        k = key[:, token, ..., None]
        change = inputs.value[:, token, :, None] - (state * k).sum(2, keepdim=True)
        state = state + inputs.beta[:, token, :, None, None] * k * change
        outputs.append((state * query[:, token, ..., None]).sum(2) * width**-0.5)
    return RuleOutputs(torch.stack(outputs, 1), state)


def scan_by_token(inputs: ScanInputs, state: torch.Tensor | None = None) -> RuleOutputs:
    """Compute outputs and the last state; `state` is the first one, (1, H, P, N), or zeros."""
    heads = inputs.x.shape[2]
    write, read = (
        tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (inputs.B, inputs.C)
    )
    state = inputs.x.new_zeros((1, *inputs.x.shape[2:], write.shape[3])) if state is None else state
    outputs = []
    for token in range(inputs.x.shape[1]):
        dt = inputs.dt[:, token, :, None, None]
        added = inputs.x[:, token, ..., None] * write[:, token, :, None]
        state = (inputs.A[:, None, None] * dt).exp() * state + dt * added
        outputs.append((state * read[:, token, :, None]).sum(3))
    return RuleOutputs(torch.stack(outputs, 1), state)


def convolution_by_token(x_BCT: torch.Tensor, weight_CW: torch.Tensor) -> torch.Tensor:
    """Compute the causal convolution, (B, C, T)."""
    width = weight_CW.shape[1]
    padded = torch.nn.functional.pad(x_BCT, (width - 1, 0))
    return torch.stack(
        [(padded[..., t : t + width] * weight_CW).sum(-1) for t in range(x_BCT.shape[2])], -1
    )
