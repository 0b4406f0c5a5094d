"""Samples that share prefixes: a row packed as a tree equals each sample alone, with TRL's packing
and with `parents`.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from test_stand_in import restore_attention
from torch.nn.functional import log_softmax, scaled_dot_product_attention
from transformers import PreTrainedModel

import hf_distca
from float64 import Float64Throughout
from hf_distca.agreement.documents import PackedDocuments, read_tree
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.integration.current_session import current_session
from ranks import RankPools
from tiny_runs import COMMON, VOCABULARY, losses, make_tokenizer, settings, tiny_llama

# By rank: groups of a prompt and its answers, as numbers of tokens.
GROUPS = [[(60, [50, 30, 40]), (9, [20, 3])], [(12, [6, 8])]]


def draw_samples(rank: int) -> list[tuple[list[int], int, int]]:
    """Draw samples as (tokens, tokens of the prompt, group); one answer forks from another."""
    rng = random.Random(rank)
    found = []
    for group, (prompt, answers) in enumerate(GROUPS[rank]):
        shared, *texts = (
            [rng.randrange(3, VOCABULARY) for _ in range(n)] for n in (prompt, *answers)
        )
        if group == 0 and len(texts) > 2:
            texts[1] = texts[0][:10] + texts[1]
        found += [(shared + text, prompt, group) for text in texts]
    return found


def score(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Compute a loss like that of GRPO: the weighted log-probability of the targets."""
    chosen = log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    return -(chosen * torch.linspace(0.5, 2, len(tokens)).double()).sum()


def pack_tree(rank: int) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Pack a rank's samples with TRL; return the batch, the places of targets, and the targets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo.packing import TreeRow

    row = TreeRow()
    targets = []
    for tokens, prompt, group in draw_samples(rank):
        ids = torch.tensor(tokens)
        mask = (torch.arange(len(ids)) >= prompt).long()
        sample = {"input_ids": ids, "completion_mask": mask, "advantage": 1.0, "group_id": group}
        row.add({**sample, "old_log_probs": torch.zeros(len(ids))})
        targets += tokens[prompt:]
    packed = row.pack()
    longest = packed["tree_max_seqlens"].tolist()
    batch = {
        name: packed[name] for name in packed if name.startswith("tree_") and "max" not in name
    }
    batch |= {"tree_max_seqlen_q": longest[0], "tree_max_seqlen_k": longest[1]}
    batch |= {name: packed[name][None] for name in ("input_ids", "position_ids")}
    return batch, packed["token_index"], torch.tensor(targets)


def train(rank: int, form: str, world: int) -> tuple[float, list[torch.Tensor], int]:
    """Train on a rank's samples, alone or as a tree; return loss, gradients and sent bytes."""
    hf_distca.configure(settings())
    model = tiny_llama("distca" if form != "alone" else "sdpa").double()
    with Float64Throughout():
        if form == "alone":
            parts = []
            for tokens, prompt, _ in draw_samples(rank):
                logits = model(input_ids=torch.tensor(tokens)[None], use_cache=False).logits[0]
                parts.append((logits[prompt - 1 : -1], tokens[prompt:]))
            logits = torch.cat([part for part, _ in parts])
            targets = torch.tensor([token for _, text in parts for token in text])
        else:
            batch, places, targets = pack_tree(rank)
            if form == "parents":
                tree = read_tree(batch)
                batch = {name: batch[name] for name in ("input_ids", "position_ids")}
                batch["distca_documents"] = tree
            logits = model(**batch, use_cache=False).logits[0, places]
        loss = score(logits, targets)
        loss.backward()
    grads = [p.grad for p in model.parameters()]
    for grad in grads if world > 1 else ():
        dist.all_reduce(grad)
    return float(loss.detach()), grads, current_session().meter.sent_bytes


@pytest.mark.parametrize("form", ["TRL", "parents"])
def test_samples_packed_as_a_tree_equal_each_sample_alone(form: str, rank_pool: RankPools) -> None:
    alone = [train(rank, "alone", 1) for rank in (0, 1)]
    found = rank_pool(2)(train, form, 2)
    assert all(sent for *_, sent in found)
    one = train(0, form, 1)
    for (loss, _, _), (want, _, _) in zip([*found, one], [*alone, alone[0]], strict=True):
        assert loss == pytest.approx(want, rel=1e-12)
    sums = [
        a + b
        for (_, *first), (_, *second) in [alone]
        for a, b in zip(first[0], second[0], strict=True)
    ]
    for got, want in zip(found[0][1] + one[1], sums + alone[0][1], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-11)


def test_inconsistent_trees_and_parents_are_refused() -> None:
    batch, *_ = pack_tree(0)
    batch["tree_kv_index"] = batch["tree_kv_index"].clone()
    batch["tree_kv_index"][-3] -= 1
    with pytest.raises(LayoutError, match="tree_kv_index of 8 parts"):
        read_tree(batch)
    for arguments in (
        {"parents": [0, -1]},
        {"parents": [-1]},
        {"parents": [-1, 0], "starts": [0, 0], "documents": [0, 1]},
    ):
        with pytest.raises(LayoutError, match="parents"):
            PackedDocuments([2, 3], **arguments)
    hf_distca.configure()
    model = tiny_llama("distca")
    model.config.is_causal = False
    tree = PackedDocuments([2, 2], parents=[-1, 0])
    positions = torch.arange(4)[None]
    with pytest.raises(UnsupportedError, match="share prefixes, and tokens see later tokens"):
        model(input_ids=positions + 3, position_ids=positions, distca_documents=tree)


def test_distca_stands_in_for_the_attention_of_trl() -> None:
    """TRL registers its attention after distca, when a trainer is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import packing

    batch, places, _ = pack_tree(0)
    hf_distca.configure()
    with restore_attention():
        want = tiny_llama("distca")(**batch, use_cache=False).logits[0, places]
        hf_distca.configure(instead_of=packing.TREE_ATTENTION)
        packing.register_tree_attention()
        model: PreTrainedModel = tiny_llama(packing.TREE_ATTENTION)
        assert torch.equal(model(**batch, use_cache=False).logits[0, places], want)


class TorchKernel:
    """FlashAttention 3 on a CPU, as far as TRL needs: causal, aligned at the bottom right."""

    @staticmethod
    def flash_attn_varlen_func(
        *states: torch.Tensor | int, softmax_scale: float | None, **_: Any
    ) -> torch.Tensor:
        q, k, v, rows, keys, *_longest = states
        found = []
        for (a, b), (c, d) in zip(pairwise(rows.tolist()), pairwise(keys.tolist()), strict=True):
            seen = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - b + a)
            states_of_part = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
            output = scaled_dot_product_attention(
                *states_of_part, attn_mask=seen, scale=softmax_scale, enable_gqa=True
            )
            found.append(output[0].transpose(0, 1))
        return torch.cat(found)


class Rollouts:
    """A rollout worker with ready rollouts, which drops new weights."""

    def __init__(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: Queue[Any] = Queue()
        self.metrics_queue: Queue[Any] = Queue()
        for step in range(8):
            for rank in (0, 1):
                for number, (tokens, prompt, group) in enumerate(draw_samples(rank)):
                    mask = np.arange(len(tokens)) >= prompt
                    self.rollout_buffer.put(
                        RolloutSample(
                            *([], [], np.array(tokens), mask.astype(int)),
                            *(np.full(len(tokens), -4.0, dtype=np.float32), number - 1.2),
                            *(0, 10 * step + 2 * rank + group, {"reward": 1.0}),
                        )
                    )

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


def train_async_grpo(rank: int, folder: str, form: str) -> tuple[list[float], int]:
    """Train with TRL's AsyncGRPOTrainer; return losses and gradient norms, and sent bytes.

    The attention is that of TRL without shared prefixes, or distca.
    """
    with warnings.catch_warnings(), restore_attention(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing

        patch.setattr(packing, "_flash_attn", lambda: TorchKernel)
        patch.setattr(torch.cuda, "get_device_name", lambda _: "CPU")  # TRL asks on CPUs, too
        hf_distca.configure(settings(), instead_of="tree_fa3" if form == "distca" else None)
        add = packing.TreeRow.add

        def add_alone(row: Any, sample: dict[str, Any]) -> None:
            known, row.roots = row.roots, {}
            add(row, sample)
            (root,) = row.roots.values()
            row.roots = {**known, (len(row.samples), None): root}

        if form == "alone":
            patch.setattr(packing.TreeRow, "add", add_alone)
        arguments = {**COMMON, "bf16": False, "max_steps": 2, "token_budget": -1}
        arguments |= {"output_dir": tempfile.gettempdir(), "per_device_train_batch_size": 4}
        arguments |= {"gradient_checkpointing": False, "learning_rate": 1e-2}
        del arguments["remove_unused_columns"]
        rollouts = Rollouts()
        trainer = AsyncGRPOTrainer(
            model=folder,
            args=AsyncGRPOConfig(**arguments),
            train_dataset=Dataset.from_dict({"prompt": ["00"] * 8}),
            processing_class=make_tokenizer(),
            rollout_worker=rollouts,
            weight_transfer=rollouts,
        )
        trainer.train()
    return losses(trainer), current_session().meter.sent_bytes


def test_async_grpo_on_trees_equals_separate_samples(tmp_path: Path, rank_pool: RankPools) -> None:
    tiny_llama("sdpa").save_pretrained(tmp_path)
    alone, ours = (
        rank_pool(2)(train_async_grpo, str(tmp_path), form) for form in ("alone", "distca")
    )
    for (want, none), (found, _) in zip(alone, ours, strict=True):
        assert not none
        assert len(found) == 4
        assert found == pytest.approx(want, rel=1e-5)
    assert any(sent for _, sent in ours)
