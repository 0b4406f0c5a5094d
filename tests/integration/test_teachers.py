"""A second model on shares: a teacher under distca in evaluation mode is exact on any number of
ranks, and one that would see only its rank's part of a document is refused by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from test_dealt import BATCHES, dealing, documents, gradients, model_for, settings, share
from transformers import FalconMambaConfig, FalconMambaForCausalLM, Lfm2Config, Lfm2ForCausalLM

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.training.document_shares import wrap_trainers
from ranks import RankPools
from tiny_runs import SIZES

# What the library knows of these batches: documents over ranks, and none.
CUT, WHOLE = 0, 3
INPUTS = ("input_ids", "position_ids", "distca_documents")


def aims_of(teacher: Any, **batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return teacher(**batch, use_cache=False).logits.softmax(-1)


def distance(student: Any, wanted: torch.Tensor, **batch: Any) -> torch.Tensor:
    return -(wanted * student(**batch, use_cache=False).logits.log_softmax(-1)).sum()


def teacher_of(kind: str, implementation: str) -> Any:
    """Another model than the student: in evaluation mode, with other weights."""
    if kind == "hybrid":
        kinds = {"layer_types": ["conv", "full_attention"]}
        config = Lfm2Config(**SIZES, **kinds, attn_implementation=implementation)
        teacher: Any = Lfm2ForCausalLM(config).double().eval()
    else:
        teacher = model_for(kind, implementation).eval()
    torch.manual_seed(1)
    for parameter in teacher.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return teacher


def distill_alone(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and gradients of whole documents, one after another, under sdpa."""
    student, teacher, losses = model_for("full", "sdpa"), teacher_of(kind, "sdpa"), []
    for number in range(len(BATCHES)):
        rows = [{"input_ids": text[None]} for text in documents(number)]
        parts = [distance(student, aims_of(teacher, **row), **row) for row in rows]
        torch.stack(parts).sum().backward()
        losses.append(sum(part.item() for part in parts))
    return losses, gradients(student)


def distill(
    rank: int, kind: str, ping_pong: bool, teacher_first: bool
) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    hf_distca.configure(settings(ping_pong=ping_pong))
    student, teacher, losses = model_for("full", "distca"), teacher_of(kind, "distca"), []
    made = dealing(2, "full", ping_pong=ping_pong)
    for number in range(len(BATCHES)):
        batch = {name: value for name, value in share(made, number, rank).items() if name in INPUTS}
        if teacher_first:
            loss = distance(student, aims_of(teacher, **batch), **batch)
        else:
            logits = student(**batch, use_cache=False).logits
            loss = -(aims_of(teacher, **batch) * logits.log_softmax(-1)).sum()
        loss.backward()
        losses.append(loss.detach())
    sums = torch.stack(losses)
    dist.all_reduce(sums)
    for parameter in student.parameters():
        dist.all_reduce(parameter.grad)
    return sums.tolist(), gradients(student), all(p.grad is None for p in teacher.parameters())


@pytest.mark.parametrize(
    ("kind", "ping_pong", "teacher_first"),
    [("full", False, True), ("windows", True, False), ("hybrid", False, True)],
)
def test_a_teacher_in_evaluation_mode_is_exact(
    rank_pool: RankPools, kind: str, ping_pong: bool, teacher_first: bool
) -> None:
    losses, grads = distill_alone(kind)
    for found, found_grads, is_frozen in rank_pool(2)(distill, kind, ping_pong, teacher_first):
        assert is_frozen
        assert found == pytest.approx(losses, rel=1e-5 if kind == "windows" else 1e-12)
        torch.testing.assert_close(found_grads, grads, rtol=1e-4, atol=1e-6)


def mamba() -> Any:
    """A model without attention."""
    torch.manual_seed(0)
    config = FalconMambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1, state_size=4)
    return FalconMambaForCausalLM(config).eval()


def compiled(teacher: Any) -> Any:
    return torch.compile(teacher, backend="eager")


def compiled_in_place() -> Any:
    teacher = teacher_of("full", "sdpa")
    teacher.compile(backend="eager")
    return teacher


def adapted() -> Any:
    """A teacher whose adapters call `forward` of the model itself."""
    return get_peft_model(teacher_of("full", "sdpa"), LoraConfig(r=2, task_type="CAUSAL_LM")).eval()


TEACHERS: dict[str, tuple[Callable[[], Any], tuple[str, ...], str]] = {
    "sdpa": (lambda: teacher_of("full", "sdpa"), INPUTS, 'attn_implementation="sdpa"'),
    "eager": (lambda: teacher_of("windows", "eager").train(), INPUTS, "eager"),
    "sdpa, compiled": (lambda: compiled(teacher_of("full", "sdpa")), INPUTS, "LlamaForCausalLM"),
    "sdpa, compiled in place": (compiled_in_place, INPUTS, "LlamaForCausalLM"),
    "sdpa, adapter": (adapted, INPUTS, "LlamaForCausalLM"),
    "mamba": (mamba, INPUTS, "FalconMambaForCausalLM"),
    "its decoder": (lambda: teacher_of("full", "sdpa").model, INPUTS, "LlamaModel"),
    "sdpa, positions": (lambda: teacher_of("full", "sdpa"), INPUTS[:2], "distca_documents"),
    "distca, positions": (lambda: teacher_of("full", "distca"), INPUTS[:2], "distca_documents"),
}


def refused_teacher(rank: int, name: str) -> tuple[str, float]:
    """What ends the first step with a cut document, after one with whole documents, and when."""
    hf_distca.configure(settings())
    wrap_trainers()
    make, inputs, _ = TEACHERS[name]
    student, teacher, made = model_for("full", "distca"), make(), dealing(2, "full")
    hf_distca.prepare(student)
    whole, cut = (share(made, number, rank) for number in (WHOLE, CUT))

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
def test_a_teacher_that_would_see_a_part_is_refused(rank_pool: RankPools, name: str) -> None:
    for said, seconds in rank_pool(2)(refused_teacher, name):
        assert TEACHERS[name][2] in said, said
        assert 'attn_implementation="distca"' in said or "model(**inputs)" in said, said
        assert seconds < 10, "the other rank is told at once"


def parts_alone(rank: int) -> tuple[str, float]:
    """What ends a step of which rank 1 cannot run the evaluation: a part without its beginning."""
    hf_distca.configure(settings())
    model, began = model_for("full", "distca"), time.monotonic()
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


def test_a_rank_that_cannot_evaluate_tells_the_others(rank_pool: RankPools) -> None:
    for said, seconds in rank_pool(2)(parts_alone):
        assert "a model in evaluation mode got" in said
        assert seconds < 10
