"""Which families run transformers' shared tests under distca, and which of those tests are left
out, with the reason.
"""

from __future__ import annotations

from typing import Any

# Experts that are all chosen: otherwise a rounding difference picks other experts, with any
# attention.
_ALL_EXPERTS = {"num_experts_per_tok": 8}
_GROUPS = {**_ALL_EXPERTS, "n_group": 1, "topk_group": 1}
_WINDOW_THEN_FULL = {"layer_types": ["sliding_attention", "full_attention"]}

# What is changed in the tiny config of a family.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # windows in some layers, like the next
    "qwen3": {},
    "mistral": {},  # a window in every layer
    "gemma2": _WINDOW_THEN_FULL,  # softcap, own scale
    "gemma3_text": _WINDOW_THEN_FULL,  # own scale
    "gpt_oss": {**_WINDOW_THEN_FULL, **_ALL_EXPERTS},  # sinks
    "qwen3_moe": _ALL_EXPERTS,
    "mixtral": _ALL_EXPERTS,  # a window in every layer
    "phi3": {},  # q, k and v are views of one tensor; a window
    "olmo2": {},
    "olmo3": _WINDOW_THEN_FULL,
    "granite": {},  # own scale
    "deepseek_v3": _GROUPS,  # k and v widths differ
    # At its 1/16, 300 steps do not overfit, with any attention.
    "cohere2": {**_WINDOW_THEN_FULL, "logit_scale": 1.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "moe_layers": [0, 1],
    },
    "glm4": {},
    "starcoder2": {},
    "olmoe": _ALL_EXPERTS,
    "gpt2": {},  # no GQA, learned positions
    "gpt_neox": {},  # no GQA
}

_WEIGHTS = "asks for attention weights, which distca refuses to return"
# Tests that do not run in any family.
LEFT_OUT = {
    "test_capture_outputs_decorator": _WEIGHTS,
    "test_eager_matches_sdpa_inference_24_fp32_pad_left_output_attentions": _WEIGHTS,
    "test_retain_grad_hidden_states_attentions": _WEIGHTS,
    "test_eager_matches_batched_and_grouped_inference_2_bf16": (
        "compares experts with experts; fails with sdpa too"
    ),
    "test_generation_tester_mixin_inheritance": (
        "asks for the generation tests, which the source distribution lacks"
    ),
}

_TEXT_HALF = "asks what only the whole model has; this is its text half, and it fails with sdpa too"
# And by family.
LEFT_OUT_OF = {
    "llama4_text": dict.fromkeys(
        (
            "test_base_model_prefix_loads_base_weights",
            "test_model_base_model_prefix",
            "test_model_rope_scaling_frequencies",
            "test_tp_plan_matches_params",
        ),
        _TEXT_HALF,
    ),
}
