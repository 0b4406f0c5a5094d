"""Two-dimensional attention masks that number documents, or have zeros inside documents."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    JambaConfig,
    Llama4TextConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedModel,
)

import hf_distca
from host_syncs import NoHostSyncs
from ranks import RankPools
from tiny_runs import SIZES, documents, settings, tiny_llama

LENGTHS = (12, 7, 23)
TEXTS = [torch.tensor(text) for text in documents(*LENGTHS)]
NUMBERS = torch.repeat_interleave(torch.arange(1, 4), torch.tensor(LENGTHS))[None]


def build_model(config: Any, implementation: str) -> PreTrainedModel:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=implementation
    )
    return made.double().train()


def compute_alone(model: PreTrainedModel) -> torch.Tensor:
    return torch.cat(
        [model(input_ids=text[None], use_cache=False).logits[0].detach() for text in TEXTS]
    )


@pytest.mark.parametrize(
    "kind",
    ["int64", "int32", "padded", "two rows", "with positions", "with documents", "evaluation"],
)
def test_a_mask_that_numbers_documents_keeps_them_apart(kind: str) -> None:
    want, model = compute_alone(tiny_llama("sdpa").double()), tiny_llama("distca").double()
    ids, mask = torch.cat(TEXTS)[None], NUMBERS
    batch: dict[str, Any] = {
        "input_ids": ids,
        "attention_mask": mask.int() if kind == "int32" else mask,
    }
    if kind == "padded":
        batch = {name: torch.nn.functional.pad(row, (2, 3)) for name, row in batch.items()}
    if kind == "two rows":
        batch = {name: row.expand(2, -1) for name, row in batch.items()}
    if kind == "with positions":
        batch["position_ids"] = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    if kind == "with documents":
        batch |= hf_distca.PackingCollator()([{"input_ids": text} for text in TEXTS])
        del batch["labels"]
    logits = model.train(kind != "evaluation")(**batch, use_cache=False).logits
    for row in logits[:, 2:-3] if kind == "padded" else logits:
        torch.testing.assert_close(row, want)


def run_numbered_documents(rank: int) -> torch.Tensor:
    hf_distca.configure(settings())
    mask = NUMBERS if rank == 0 else NUMBERS.flip(1)
    ids = torch.cat(TEXTS if rank == 0 else TEXTS[::-1])[None]
    return (
        tiny_llama("distca")
        .double()(input_ids=ids, attention_mask=mask, use_cache=False)
        .logits[0]
        .detach()
    )


def test_documents_numbered_by_masks_are_exact_on_two_ranks(rank_pool: RankPools) -> None:
    want = compute_alone(tiny_llama("sdpa").double())
    first, second = rank_pool(2)(run_numbered_documents)
    torch.testing.assert_close(first, want)
    torch.testing.assert_close(torch.cat(second.split(LENGTHS[::-1])[::-1]), want)


JAMBA = JambaConfig(use_mamba_kernels=False, attn_layer_period=2, attn_layer_offset=1, **SIZES)
REFUSED: dict[str, tuple[Any, str]] = {
    "opt": (
        AutoConfig.for_model(
            "opt", ffn_dim=48, word_embed_proj_dim=64, attention_dropout=0.0, **SIZES
        ),
        "count positions by the mask",
    ),
    "jamba": (JAMBA, "not proven that only attention reads the mask"),
    "mixtral": (
        MixtralConfig(output_router_logits=True, **SIZES),
        "the loss of their routers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_mask_that_numbers_documents_is_refused_if_other_parts_read_masks(kind: str) -> None:
    config, why = REFUSED[kind]
    model = build_model(config, "distca").float()  # experts do not run in float64
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=f"attention_mask numbers the documents .* but {kind} models need .*{why}",
    ):
        model(input_ids=torch.cat(TEXTS)[None], attention_mask=NUMBERS, use_cache=False)
    model(input_ids=torch.cat(TEXTS)[None], attention_mask=NUMBERS.clamp(max=1), use_cache=False)


def test_attention_mask_is_not_read_by_the_layers() -> None:
    """The mask is copied to the host once, with the positions and before the layers."""
    ids, model = torch.cat(TEXTS)[None], tiny_llama("distca").double()
    mask, layer = NUMBERS.clone(), model.model.layers[1]
    plain = layer.forward

    def unread(*args: Any, **kwargs: Any) -> Any:
        with NoHostSyncs(of=[ids, mask]):
            return plain(*args, **kwargs)

    layer.forward = unread
    model(input_ids=ids, attention_mask=mask, use_cache=False)


WINDOW = MistralConfig(sliding_window=16, **SIZES)
CHUNKS = Llama4TextConfig(
    **SIZES,
    intermediate_size_mlp=48,
    head_dim=16,
    num_local_experts=1,
    attention_chunk_size=16,
    layer_types=["chunked_attention", "full_attention"],
    use_qk_norm=False,
)


def make_mask(tokens: int, *holes: tuple[int, int], length: int = 40) -> torch.Tensor:
    mask = (torch.arange(length) < tokens).long()[None]
    for begin, end in holes:
        mask[:, begin:end] = 0
    return mask


@pytest.mark.parametrize("config", [WINDOW, CHUNKS], ids=["window", "chunks"])
@pytest.mark.parametrize("positions", [False, True])
def test_zeros_in_documents_longer_than_a_window_are_refused(config: Any, positions: bool) -> None:
    mask = make_mask(40, (10, 14))
    ids = torch.tensor([documents(40)[0]])
    beside = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if positions else {}
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"zeros inside a document of 40 tokens .* of 16 tokens",
    ):
        build_model(config, "distca")(input_ids=ids, attention_mask=mask, use_cache=False, **beside)


@pytest.mark.parametrize(
    ("config", "mask"),
    [
        (WINDOW, make_mask(16, (5, 9))),  # the document fits into the window
        (WINDOW, make_mask(30)),
        (WINDOW, make_mask(40, (0, 13))),
        (CHUNKS, make_mask(16, (5, 9))),
        (CHUNKS, make_mask(30)),
        (MistralConfig(sliding_window=None, **SIZES), make_mask(38, (5, 9), (20, 21))),
    ],
    ids=["short", "right", "left", "short, chunks", "right, chunks", "no window"],
)
def test_other_zeros_of_a_mask_give_the_logits_of_sdpa(config: Any, mask: torch.Tensor) -> None:
    ids = torch.tensor([documents(40)[0]])
    batch = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    ours, theirs = (
        build_model(config, name)(**batch).logits[mask > 0] for name in ("distca", "sdpa")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def catch_zeros_on_one_rank(rank: int) -> str:
    hf_distca.configure(settings(timeout_seconds=20))
    tokens = (80, 40)[rank]  # rank 1 would serve rank 0
    mask = make_mask(40, (10, 14)) if rank == 1 else make_mask(tokens, length=tokens)
    with pytest.raises(hf_distca.DistCAError) as caught:
        build_model(WINDOW, "distca")(
            input_ids=torch.tensor([documents(tokens)[0]]), attention_mask=mask, use_cache=False
        )
    return str(caught.value)


def test_refused_zeros_on_one_rank_raise_on_all_ranks(rank_pool: RankPools) -> None:
    assert all(
        "zeros inside a document" in error for error in rank_pool(2)(catch_zeros_on_one_rank)
    )
