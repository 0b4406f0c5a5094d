"""transformers' shared tests with distca as attention: one test case a family of
`shared_families.FAMILIES`.

Run by `run.py`, which obtains `transformers_shared_tests` first. Attention is distca in every model
that a test makes: the config says so, and the key "sdpa", which is what transformers falls back to
when a test reloads a model or asks for it by name, stands for distca as well. Tests that compare
"eager" and "sdpa" then compare eager and distca.
"""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from shared_families import FAMILIES, LEFT_OUT, LEFT_OUT_OF
from tiny import FIRST_ORDINARY_TOKEN, VOCABULARY, class_of, tiny_config
from tiny_sizes import SIZES
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers_shared_tests.test_modeling_common import ModelTesterMixin
from transformers_shared_tests.test_training_mixin import TrainingTesterMixin

import hf_distca
from hf_distca.integration import attention_names


class Maker:
    """What the shared tests ask of a family: a small config, and inputs that fit it."""

    is_training = True
    batch_size, seq_length = 8, 12
    num_hidden_layers = 2
    vocab_size, hidden_size, num_attention_heads = (
        VOCABULARY,
        SIZES["hidden_size"],
        SIZES["num_attention_heads"],
    )

    def __init__(self, model_type: str, attention: str | None) -> None:
        self.model_type, self.attention = model_type, attention
        self.causal_lm_class = class_of(model_type)

    def get_config(self) -> PreTrainedConfig:
        config = tiny_config(self.model_type)
        config.use_cache = True
        config.num_hidden_layers = self.num_hidden_layers
        for name, value in FAMILIES[self.model_type].items():
            setattr(config, name, value)
        config._attn_implementation = self.attention
        return config

    def prepare_config_and_inputs_for_common(
        self,
    ) -> tuple[PreTrainedConfig, dict[str, torch.Tensor]]:
        """Full rows, one padded on the right and one on the left."""
        ids = torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (self.batch_size, self.seq_length))
        mask = torch.ones_like(ids)
        mask[1, -3:] = 0
        mask[2, :5] = 0
        return self.get_config(), {"input_ids": ids, "attention_mask": mask}


class Family(ModelTesterMixin, TrainingTesterMixin):
    """The shared tests of one family; a base without tests of its own to collect."""

    model_type: ClassVar[str]

    @pytest.fixture(autouse=True)
    def _attention(self, request: pytest.FixtureRequest) -> Iterator[None]:
        control = request.config.getoption("control")
        self.attention = "sdpa" if control else "distca"
        self.model_tester = Maker(self.model_type, None if control else "distca")
        if control:
            yield
            return
        hf_distca.configure()
        with distca_as_sdpa(self.all_model_classes) as calls:
            yield
        request.node.user_properties.append(("calls", len(calls)))

    def test_inference_equivalence_left_padding(self) -> None:
        self.flash_attn_inference_equivalence(self.attention, "left")

    def test_inference_equivalence_right_padding(self) -> None:
        self.flash_attn_inference_equivalence(self.attention, "right")

    def test_model_outputs_equivalence(self) -> None:
        self.has_attentions = False  # all but the part that asks for attention weights
        super().test_model_outputs_equivalence()


@contextmanager
def distca_as_sdpa(model_classes: tuple[type[PreTrainedModel], ...]) -> Iterator[list[None]]:
    """Let the key "sdpa" mean distca, and yield a list that grows by one with every call of distca.

    Models without sdpa (Gemma 2, gpt-oss) or with few flash attentions say so in class attributes
    that the tests look at; those attributes say nothing of distca, so they are lifted.
    """
    calls: list[None] = []
    functions, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    ours = functions["distca"]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return ours(*args, **kwargs)

    with ExitStack() as undo:
        undo.enter_context(patch.dict(functions, {"distca": counted, "sdpa": counted}))
        # Else it would be refused.
        undo.enter_context(
            patch.dict(attention_names._registered, {"distca": counted, "sdpa": counted})
        )
        undo.enter_context(patch.dict(masks, {"sdpa": masks["distca"]}))
        for model_class in model_classes:
            lifted = {
                "_supports_sdpa": True,
                "_supports_flash_attn": True,
                "_compatible_flash_implementations": None,
            }
            undo.enter_context(patch.multiple(model_class, **lifted))
        yield calls


def case(model_type: str) -> type[unittest.TestCase]:
    """The test case of a family."""
    causal_lm = class_of(model_type)
    base = MODEL_MAPPING[type(tiny_config(model_type))]
    # A test that is None is none.
    left_out = dict.fromkeys(LEFT_OUT | LEFT_OUT_OF.get(model_type, {}))
    if unknown := [name for name in left_out if not hasattr(Family, name)]:
        raise ValueError(
            f"{model_type} leaves out {', '.join(unknown)}, which transformers' tests do not have."
        )
    members = {
        "model_type": model_type,
        "all_model_classes": (base, causal_lm),
        "__module__": __name__,
        **left_out,
    }
    return type(f"Test_{model_type}", (Family, unittest.TestCase), members)


globals().update({f"Test_{model_type}": case(model_type) for model_type in FAMILIES})
