"""Which model families can be split into stages: those that were split and compared with the whole model.

tests/pipeline/test_split.py splits a tiny model of every proven family and holds the list.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.families import check_family, check_layerdrop
from hf_distca.integration.loading import distca_configs

__all__ = ["SPLIT", "check_split"]

# Two stages, one after the other, give the logits and gradients of the whole model.
_SPLIT = """
    afmoe apertus arcee aria_text axk1 beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text cwm dbrx
    deepseek_v2 deepseek_v3 diffllama dots1 emu3 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2
    gemma3_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
    internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text longcat_flash mellum mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt
    persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma youtu
"""

SPLIT = frozenset(_SPLIT.split())


def check_split(model: PreTrainedModel) -> None:
    """Refuse a model that is not known to be the same in stages.

    Raises:
        ConfigError: if it has other attention than distca's, which knows nothing of stages.
        UnsupportedError: says why.
    """
    config = model.config
    check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
    if not distca_configs(model):
        name = getattr(config, "_attn_implementation", None)
        raise ConfigError(
            f'{type(model).__name__} has attn_implementation="{name}", whose attention stages cannot share: load the model with '
            'attn_implementation="distca".'
        )
    check_layerdrop(config)
    why = None
    if config.model_type not in SPLIT:
        why = "models of this family were never compared with their stages, or are not layers between an embedding and a head"
    elif shared := getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
        why = f"{shared} of its layers read keys of other layers (num_kv_shared_layers={shared}), which may be on another stage"
    elif getattr(config.get_text_config(decoder=True), "output_router_logits", False):
        why = "it adds a loss of its routers (output_router_logits=True), which stages do not hand on; set it to False"
    if why is not None:
        raise UnsupportedError(
            f"hf_distca.pipeline does not split {config.model_type} models: {why}. Train it with data parallelism, whose ranks "
            "share attention too."
        )
