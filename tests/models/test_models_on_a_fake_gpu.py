"""Whole models on a GPU that is not there: a forward in training mode, with rotary embeddings and masks.

Every operation runs for its device, dtype and shape alone, and what would make the host wait for the GPU raises. torch's builds
for CPUs have no autograd on such tensors: backward is in tests/runtime/test_fake_gpu_layer.py, for the layer alone.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_distca
from device_events import Device
from fake_cuda import CUDA, fake_cuda, needs_cpu_build
from hf_distca import kernels
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.session import current_session
from host_syncs import NoHostSyncs

pytestmark = needs_cpu_build
SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 1),
}
# Those whose own layers read no tensor, and how many layers have every kind: experts that are counted make the host wait with any
# attention.
FAMILIES = {
    **dict.fromkeys(["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3", "cohere2", "smollm3"], 2),
    "gemma4_text": 6,
}


class NoWaits(NoHostSyncs):
    """Copies from page-locked memory to the GPU may be started: nobody waits for them."""

    def _check(self, func: Any, given: list[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> None:
        upload = kwargs.get("non_blocking") and kwargs.get("device") == CUDA
        if not upload:
            super()._check(func, given, args, kwargs)


def to_gpu(model: torch.nn.Module) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = torch.empty(parameter.shape, dtype=parameter.dtype, device=CUDA)
                module._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=CUDA)


@pytest.mark.parametrize(("family", "layers"), FAMILIES.items())
def test_a_forward_stays_on_the_gpu_and_lets_the_host_run_ahead(
    family: str, layers: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(kernels, "wrong", lambda *case: None)
    hf_distca.configure()
    config = AutoConfig.for_model(family, num_hidden_layers=layers, **SIZES)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca", dtype=torch.bfloat16).train()
    gpu = Device()
    with fake_cuda(), gpu.installed(), caplog.at_level(logging.INFO, logger="hf_distca"):
        to_gpu(model)
        ids, positions = (torch.empty(1, 100, dtype=torch.int64, device=CUDA) for _ in range(2))
        documents = PackedDocuments((60, 40))
        with NoWaits() as mode:
            out = model(input_ids=ids, position_ids=positions, use_cache=False, distca_documents=documents).logits
        assert (tuple(out.shape), out.device) == ((1, 100, 64), CUDA)
        assert mode.operations > 50
    assert current_session().meter.calls == layers
    assert "runs in kernel 'cuda'" in caplog.text
    assert ("runs in kernel 'efficient'" in caplog.text) == (family == "gemma4_text"), "its global layers are 512 wide"
    assert gpu.waits == []
    hf_distca.configure()
