"""A teacher in evaluation mode is exact on shares, or is refused if it sees parts of documents."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from test_dealt import (
    BATCHES,
    build_model,
    deal,
    draw_texts,
    get_gradients,
    make_share,
    settings,
    sum_gradients,
)
from transformers import FalconMambaConfig, FalconMambaForCausalLM, Lfm2Config, Lfm2ForCausalLM

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.training.document_shares import wrap_trainers
from ranks import RankPools
from tiny_runs import SIZES

# Indices of a global batch with a cut document, and of a global batch of whole documents.
CUT, WHOLE = 0, 3
INPUTS = ("input_ids", "position_ids", "distca_documents")


def predict(teacher: Any, **batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return teacher(**batch, use_cache=False).logits.softmax(-1)


def compare(student: Any, wanted: torch.Tensor, **batch: Any) -> torch.Tensor:
    return -(wanted * student(**batch, use_cache=False).logits.log_softmax(-1)).sum()


def build(kind: str, implementation: str) -> Any:
    """Build a teacher in evaluation mode, with other weights than the student."""
    if kind == "hybrid":
        kinds = {"layer_types": ["conv", "full_attention"]}
        config = Lfm2Config(**SIZES, **kinds, attn_implementation=implementation)
        teacher: Any = Lfm2ForCausalLM(config).double().eval()
    else:
        teacher = build_model(kind, implementation).eval()
    torch.manual_seed(1)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return teacher


def distill_alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Distill on whole documents under sdpa; return losses and gradients."""
    student, teacher, losses = build_model("full", "sdpa"), build(kind, "sdpa"), []
    for number in range(len(BATCHES)):
        rows = [{"input_ids": text[None]} for text in draw_texts(number)]
        parts = [compare(student, predict(teacher, **row), **row) for row in rows]
        torch.stack(parts).sum().backward()
        losses.append(sum(part.item() for part in parts))
    return losses, get_gradients(student)


def distill(
    rank: int, kind: str, ping_pong: bool, teacher_first: bool
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    hf_distca.configure(settings(ping_pong=ping_pong))
    student, teacher, losses = build_model("full", "distca"), build(kind, "distca"), []
    made = deal(2, "full", ping_pong=ping_pong)
    for number in range(len(BATCHES)):
        batch = {
            name: value for name, value in make_share(made, number, rank).items() if name in INPUTS
        }
        if teacher_first:
            loss = compare(student, predict(teacher, **batch), **batch)
        else:
            logits = student(**batch, use_cache=False).logits
            loss = -(predict(teacher, **batch) * logits.log_softmax(-1)).sum()
        loss.backward()
        losses.append(loss.detach())
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    is_frozen = all(p.grad is None for p in teacher.parameters())
    return sums.tolist(), sum_gradients(student), is_frozen


@pytest.mark.parametrize(
    ("kind", "ping_pong", "teacher_first"),
    [("full", False, True), ("windows", True, False), ("hybrid", False, True)],
)
def test_teacher_in_evaluation_mode_gives_the_losses_of_whole_documents(
    rank_pool: RankPools, kind: str, ping_pong: bool, teacher_first: bool
) -> None:
    losses, grads = distill_alone(kind)
    for found, found_grads, is_frozen in rank_pool(2)(distill, kind, ping_pong, teacher_first):
        assert is_frozen
        assert found == pytest.approx(losses, rel=1e-5 if kind == "windows" else 1e-12)
        torch.testing.assert_close(found_grads, grads, rtol=1e-4, atol=1e-6)


def build_mamba() -> Any:
    """Build a model without attention."""
    torch.manual_seed(0)
    config = FalconMambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
    return FalconMambaForCausalLM(config).eval()


def compile_teacher(teacher: Any) -> Any:
    return torch.compile(teacher, backend="eager")


def build_compiled_in_place() -> Any:
    teacher = build("full", "sdpa")
    teacher.compile(backend="eager")
    return teacher


def build_adapted() -> Any:
    """Build a teacher whose adapter calls the model's `forward` directly."""
    return get_peft_model(build("full", "sdpa"), LoraConfig(r=2, task_type="CAUSAL_LM")).eval()


TEACHERS: dict[str, tuple[Callable[[], Any], tuple[str, ...], str]] = {
    "sdpa": (lambda: build("full", "sdpa"), INPUTS, 'attn_implementation="sdpa"'),
    "eager": (lambda: build("windows", "eager").train(), INPUTS, "eager"),
    "sdpa, compiled": (lambda: compile_teacher(build("full", "sdpa")), INPUTS, "LlamaForCausalLM"),
    "sdpa, compiled in place": (build_compiled_in_place, INPUTS, "LlamaForCausalLM"),
    "sdpa, adapter": (build_adapted, INPUTS, "LlamaForCausalLM"),
    "mamba": (build_mamba, INPUTS, "FalconMambaForCausalLM"),
    "its decoder": (lambda: build("full", "sdpa").model, INPUTS, "LlamaModel"),
    "sdpa, positions": (lambda: build("full", "sdpa"), INPUTS[:2], "distca_documents"),
    "distca, positions": (lambda: build("full", "distca"), INPUTS[:2], "distca_documents"),
}


def catch_refusal(rank: int, name: str) -> tuple[str, float]:
    """Run a step of whole documents, then a step with a cut document; return the error and its
    seconds.
    """
    hf_distca.configure(settings())
    wrap_trainers()
    make, inputs, _ = TEACHERS[name]
    student, teacher, made = build_model("full", "distca"), make(), deal(2, "full")
    hf_distca.prepare(student)
    whole, cut = (make_share(made, number, rank) for number in (WHOLE, CUT))

    def step(batch: dict[str, Any]) -> None:
        with torch.no_grad():
            teacher(**{key: batch[key] for key in inputs}, use_cache=False)
        student(**{key: batch[key] for key in INPUTS}, use_cache=False)

    step(whole)
    began = time.monotonic()
    with pytest.raises(hf_distca.DistCAError) as caught:
        step(cut)
    return str(caught.value), time.monotonic() - began


@pytest.mark.parametrize("name", TEACHERS)
def test_teacher_that_sees_a_part_of_a_document_is_refused(rank_pool: RankPools, name: str) -> None:
    for said, seconds in rank_pool(2)(catch_refusal, name):
        assert TEACHERS[name][2] in said, said
        assert 'attn_implementation="distca"' in said or "model(**inputs)" in said, said
        assert seconds < 10, "the other rank gets the error at once"


def catch_error_of_a_part(rank: int) -> tuple[str, float]:
    """Evaluate a document without its beginning on rank 1; return the error and its seconds."""
    hf_distca.configure(settings())
    model, began = build_model("full", "distca"), time.monotonic()
    hf_distca.prepare(model)
    batch = {
        "input_ids": torch.ones(1, 10, dtype=torch.long),
        "position_ids": torch.arange(10)[None] + 10 * rank,
        "distca_documents": PackedDocuments((10,), (10 * rank,), (7,)),
    }

    def step() -> None:
        for training in (False, True):
            model.train(training)(**batch, use_cache=False)

    with pytest.raises(hf_distca.DistCAError) as caught:
        step()
    return str(caught.value), time.monotonic() - began


def test_error_of_evaluation_on_one_rank_reaches_all_ranks(rank_pool: RankPools) -> None:
    for said, seconds in rank_pool(2)(catch_error_of_a_part):
        assert "a model in evaluation mode got" in said
        assert seconds < 10
