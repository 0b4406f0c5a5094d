"""The observer, which measures imbalance without balancing: its figures equal those that distca
plans with, and it does not change training.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import (
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    default_data_collator,
)
from typer.testing import CliRunner

import hf_distca
import scripts
from checkpointed import ARGUMENT, checkpoint_layers
from hf_distca.integration.hooks import other_models
from hf_distca.runtime.meter import Meter
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.gpus import make_gpu_cost
from hf_distca.tools.cli import app
from hf_distca.tools.observe import run_observer
from hf_distca.tools.observe.findings import Findings, Row, find
from hf_distca.tools.observe.watch import BatchFacts, Watch
from pages import ROOT, words_of
from ranks import RankPools
from recorded import recorded
from tiny_runs import SIZES, documents, exact_arguments, losses, tiny_llama

PACKED = ((1024,), (128,) * 8)
STEPS = 4


def rows(count: int) -> list[dict[str, Any]]:
    """Make packed rows. Read in order, they give rank 0 the rows with one long document."""
    packed = []
    for number in range(count):
        lengths = PACKED[number % 2]
        ids = [token for one in documents(*lengths, seed=number) for token in one]
        positions = [place for length in lengths for place in range(length)]
        packed.append({"input_ids": ids, "labels": ids, "position_ids": positions})
    return packed


def train(
    rank: int, implementation: str, folder: str, changes: dict[str, Any]
) -> tuple[list[float], list[str], list[dict[str, float]]]:
    """Train, and return losses, collectives and logs. The implementation chooses the callback."""
    how = {"learning_rate": 1e-2, "train_sampling_strategy": "sequential", **changes}
    config = hf_distca.DistCAConfig(measured_rates=False, cost_model="analytic")
    callbacks: dict[str, list[TrainerCallback]] = {
        "distca": [hf_distca.DistCACallback(config, record=False)],
        "alone": [],
    }
    name = "sdpa" if implementation == "alone" else implementation
    trainer = Trainer(
        tiny_llama(name),
        exact_arguments(output_dir=folder, max_steps=STEPS, **how),
        data_collator=default_data_collator,
        train_dataset=rows(2 * STEPS),
        callbacks=callbacks.get(implementation, [hf_distca.ImbalanceCallback()]),
    )
    with recorded() as collectives:
        trainer.train()
    return losses(trainer), collectives, trainer.state.log_history


def test_observed_imbalance_equals_the_imbalance_in_plans(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    """Compare the same batches, within 2 %. The observer adds no collective and changes no loss."""
    alone, watched, balanced = (
        rank_pool(2)(train, implementation, str(tmp_path), {})
        for implementation in ("alone", "sdpa", "distca")
    )
    for rank in range(2):
        assert watched[rank][:2] == alone[rank][:2], "exact losses, and collectives"
    figures, expected = watched[0][2][:STEPS], balanced[0][2][:STEPS]
    for found, planned in zip(figures, expected, strict=True):
        before = planned["distca/imbalance_estimated_before"]
        assert before > 1.2
        assert found["distca/observed_documents"] == pytest.approx(before, rel=0.02)
        assert found["distca/observed_measured"] >= 1
        assert 0 < found["distca/observed_attention_share"] < 1
    assert 1 <= figures[0]["distca/observed_dealt"] <= figures[0]["distca/observed_as_given"]
    assert not any("observed" in name for name in watched[1][2][0]), (
        "only rank 0 has the figures of all ranks"
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{ARGUMENT: True}, {"gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_checkpointing_and_accumulation_keep_the_observed_imbalance(
    rank_pool: RankPools,
    tmp_path: Path,
    implementation: str,
    changes: dict[str, Any],
) -> None:
    found = rank_pool(2)(train, implementation, str(tmp_path), changes)
    expected = rank_pool(2)(train, "sdpa", str(tmp_path), {})
    assert found[0][2][0]["distca/observed_documents"] == pytest.approx(
        expected[0][2][0]["distca/observed_documents"]
    )


def observe(batches: int = 3) -> str:
    """Watch some micro-batches and return the printed text."""
    said: list[str] = []
    with patch.object(run_observer, "print_lines", said.append):
        meter, model = run_observer.Observer(), tiny_llama("sdpa")
        meter.begin()
        for _ in range(batches):
            model(tokens(1, 8)).logits.sum().backward()
        meter.end()
    return "".join(said)


def watch_alone(rank: int) -> tuple[str, float]:
    """Return rank 0's printed text and its seconds. Rank 1 has no observer."""
    with patch.object(run_observer, "_PATIENCE", 0.5):
        began = time.monotonic()
        return observe() if rank == 0 else "", time.monotonic() - began


def test_observer_waits_only_once_for_a_rank_without_an_observer(rank_pool: RankPools) -> None:
    (said, seconds), nothing = rank_pool(2)(watch_alone)
    assert nothing[0] == ""
    assert "missing   facts of some ranks" in said
    assert seconds < 5


def watch_lagging(rank: int) -> str:
    """Return rank 0's printed text. The device of rank 1 lags by three micro-batches, its host by a
    moment, and facts are also gathered between logs.
    """

    class LaggingMeter(Meter):
        made, lag = 0, 3 * rank

        def __init__(self) -> None:
            super().__init__()
            LaggingMeter.made = self.number = LaggingMeter.made + 1

        @property
        def is_finished(self) -> bool:
            return self.made >= self.number + self.lag

    said: list[str] = []
    with (
        patch.object(run_observer, "_MOST_BATCHES", 8),
        patch.object(run_observer, "print_lines", said.append),
        patch("hf_distca.tools.observe.watch.Meter", LaggingMeter),
    ):
        meter, model = run_observer.Observer(), tiny_llama("sdpa")
        meter.begin()
        for log in range(3):
            for _ in range(20):
                model(tokens(1, 8)).logits.sum().backward()
            time.sleep(rank * (log == 1))
            meter.gather()
        LaggingMeter.lag = 0
        meter.end()
    return "".join(said)


def test_ranks_whose_devices_lag_lose_no_micro_batches(rank_pool: RankPools) -> None:
    said, nothing = rank_pool(2)(watch_lagging)
    assert nothing == ""
    assert "watched 60 micro-batches on 2 ranks" in said
    assert "missing" not in said


def test_observer_on_one_process_prints_that_no_rank_can_share() -> None:
    assert "alone     one process has nobody to share with" in observe()
    assert observe(0) == "", "no training was watched"


LOOP = """
import os, sys
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
config = LlamaConfig(
    hidden_size=32, intermediate_size=32, vocab_size=31, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2,
)
model = DistributedDataParallel(LlamaForCausalLM(config))
ids = torch.ones((1, 512), dtype=torch.long)
positions = torch.arange(512)[None] % (512 if rank else 64)
for _ in range(6):
    model(input_ids=ids, position_ids=positions).logits.sum().backward()
torch.distributed.destroy_process_group()
"""


def test_command_watches_a_training_loop_without_a_trainer(tmp_path: Path) -> None:
    """The loop is unchanged and writes no known log, and its world ends before the summary."""
    (tmp_path / "loop.py").write_text(LOOP)
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")
    launch = ["accelerate", "launch", "--config_file", config, "-m", "hf_distca.tools.run"]
    said = scripts.run([*launch, "--observe", "loop.py"], tmp_path)
    assert "distca watched 6 micro-batches on 2 ranks, and changed nothing" in said
    assert "measured, under sdpa" in said


@pytest.mark.slow
def test_commands_of_the_first_page_watch_balance_and_report_a_trainer(tmp_path: Path) -> None:
    """The script does not import hf_distca. Like most scripts, it imports the Trainer first."""
    (tmp_path / "train.py").write_text(TRAINER)
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")

    def run(command: list[str]) -> tuple[str, list[str]]:
        said = scripts.run([*command[:-1], "--config_file", config, command[-1]], tmp_path)
        return said, re.findall(r"'loss': '(\S+)'", said)

    watched, losses = run(words_of("hf-distca run --observe accelerate launch train.py"))
    assert "'distca/observed_documents': '1." in watched
    assert "distca watched 3 micro-batches on 2 ranks" in watched
    assert watched.count("and changed nothing") == 1
    command = words_of("hf-distca run --instead-of sdpa accelerate launch train.py")
    assert "put hf-distca run --instead-of sdpa in front of your command" in watched
    balanced, same_losses = run(command)
    assert "distca: 3 micro-batches on 2 ranks" in balanced
    assert same_losses == losses
    assert len(losses) == 3
    scripts.run(words_of("hf-distca report out"), tmp_path)
    assert "slowest rank / mean attention" in (tmp_path / "report.html").read_text()


# The first import is the Trainer, which imports the modules that all models share.
TRAINER = """
from transformers import Trainer, TrainingArguments
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=32, vocab_size=31, num_hidden_layers=1, num_attention_heads=2
)
rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (4000, 300) * 3]
arguments = TrainingArguments(
    "out", max_steps=3, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,
    per_device_train_batch_size=1, disable_tqdm=True, train_sampling_strategy="sequential",
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    "option", ["--tokens-per-rank=8", "--instead-of=sdpa", "--set=tolerance=0.1", "--servers=1"]
)
def test_options_that_change_training_are_refused_with_observe(option: str) -> None:
    refused = CliRunner().invoke(app, ["run", "--observe", option, "train.py"])
    assert refused.exit_code == 2
    assert "observe measures training as it is" in refused.output


def watch(model: PreTrainedModel, *batches: dict[str, Any]) -> list[BatchFacts]:
    """Return the facts of the forward and backward of each batch."""
    watching = Watch(lambda: None)
    watching.start()
    for batch in batches:
        model(**batch, use_cache=False).logits.sum().backward()
    facts = watching.take(end=True)
    watching.stop()
    return facts


def tokens(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.long)


def test_padded_batches_count_lengths_without_padding() -> None:
    mask = torch.tensor([[1] * 40, [0] * 25 + [1] * 15])
    (facts,) = watch(tiny_llama("sdpa"), {"input_ids": tokens(2, 40), "attention_mask": mask})
    assert facts.lengths == [40, 15]
    assert facts.shape == (4, 2, 16, 16, 4)
    assert (facts.attention, facts.device, facts.unread) == ("sdpa", "cpu", "")
    assert facts.seconds > 0


def test_documents_are_read_from_position_ids_or_cu_seq_lens() -> None:
    positions = torch.cat([torch.arange(24), torch.arange(8)])[None]
    bounds = torch.tensor([0, 24, 32], dtype=torch.int32)
    by_positions, by_bounds = watch(
        tiny_llama("sdpa"),
        {"input_ids": tokens(1, 32), "position_ids": positions},
        {"input_ids": tokens(1, 32), "cu_seq_lens_q": bounds},
    )
    assert by_positions.lengths == by_bounds.lengths == [24, 8]


def test_facts_of_unreadable_batches_state_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    # In a process that trained on shares, calls of all models are checked.
    monkeypatch.setattr(other_models, "_check_call", lambda *_: None)
    falling = torch.tensor([[0, 1, 2, 5, 4, 5, 6, 7]])
    cut = torch.arange(8, 16)[None]
    facts = watch(
        tiny_llama("sdpa"),
        {"input_ids": tokens(1, 8), "position_ids": falling},
        {"input_ids": tokens(1, 8), "position_ids": cut},
    )
    assert "falls from 5 to 4" in facts[0].unread
    assert "begins at position 8" in facts[1].unread


def test_forwards_without_training_are_not_watched() -> None:
    model, watching = tiny_llama("sdpa"), Watch(lambda: None)
    watching.start()
    with torch.no_grad():
        model(tokens(1, 8))
    model.eval()(tokens(1, 8))
    watching.stop()
    model.train()(tokens(1, 8))
    assert watching.take() == []


def test_facts_hold_the_windows_of_layers() -> None:
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).train()
    (facts,) = watch(model, {"input_ids": tokens(1, 64)})
    assert facts.layers == [(16, 2)]


def test_checkpointed_layers_count_once_more_for_their_recompute() -> None:
    model = tiny_llama("sdpa")
    checkpoint_layers(model, use_reentrant=False)
    (facts,) = watch(model, {"input_ids": tokens(1, 32)})
    assert facts.lengths == [32]
    assert facts.layers == [(None, 4)], "two layers, twice"


FACTS = BatchFacts((32, 8, 128, 128, 2), "cuda", "flash", [4096], [(None, 2)], 2.0)
SHORT = FACTS._replace(lengths=[512] * 8, seconds=1.0)


def add_up(*ranks: BatchFacts, count: int = 8) -> Findings:
    rows = [find(ranks, None, plans=number == 0) for number in range(count)]
    return Findings(rows, 10.0 * count)


def test_figures_of_documents_follow_from_work_and_seconds() -> None:
    found = add_up(FACTS, SHORT)
    cost = CostModel.make_analytic(AttentionShape(32, 8, 128, 128, 2), device_type="cuda")
    work = [float(cost.estimate_seconds(n, n).sum()) for n in ([4096], [512] * 8)]
    figures = found.compute_figures()
    assert figures["documents"] == pytest.approx(2 * work[0] / sum(work))
    assert figures["measured"] == pytest.approx(4 / 3)
    assert figures["attention_share"] == pytest.approx(0.15)
    assert figures["slowest_rank"] == 0
    assert figures["as_given"] == pytest.approx(figures["documents"]), "no move pays off"
    assert found.tokens == 8 * 8192


def test_description_names_the_rank_that_is_slow_for_equal_documents() -> None:
    """The rank is named even if another rank has more work."""
    said = "\n".join(add_up(FACTS, FACTS._replace(seconds=3.0), count=20).describe("flash"))
    assert "rank 1, in 20 of 20 micro-batches; for equal documents rank 1 takes longest" in said
    assert "1.20 x the median rank" in said
    slow = SHORT._replace(seconds=1.9)
    said = "\n".join(add_up(FACTS, SHORT, SHORT, slow, count=20).describe("flash"))
    assert "rank 0, in 20 of 20 micro-batches; for equal documents rank 3 takes longest" in said


def test_rank_slow_by_its_documents_gets_advice_to_balance() -> None:
    cost = CostModel.make_analytic(AttentionShape(32, 8, 128, 128, 2), device_type="cuda")
    ranks = [
        FACTS._replace(lengths=n, seconds=float(cost.estimate_seconds(n, n).sum()) * 1e3)
        for n in ([65536], [2048] * 32)
    ]
    said = "\n".join(add_up(*ranks, count=20).describe("flash_attention_2"))
    assert "slowest   rank 0, in 20 of 20 micro-batches" in said
    assert "1.00 x the median rank" in said
    assert "hf-distca run --instead-of flash_attention_2 in front of your command" in said
    assert "--tokens-per-rank 65536" in said
    assert "estimated in 1 of 20, by documents" in said


def test_balancing_that_costs_more_than_it_saves_is_not_advised() -> None:
    """At built-in rates, moving 4,096 tokens takes longer than it saves."""
    found = add_up(FACTS, SHORT, count=1)
    said = "\n".join(found.describe("flash_attention_2"))
    assert found.compute_figures()["documents"] > 1.5
    assert "messages take longer than balancing saves here" in said
    assert "in front of your command" not in said
    assert "estimated in" not in said, "every micro-batch was planned"


@pytest.mark.parametrize(("given", "is_advised"), [(1.0, False), (1.3, True)])
def test_dealing_is_advised_only_if_not_slower(given: float, is_advised: bool) -> None:
    row = Row(8192, np.array([2.0, 1.0]), np.array([2.0, 1.0]), (given, 1.2))
    said = "\n".join(Findings([row], 10.0).describe("sdpa"))
    assert "balance   put hf-distca run" in said
    assert ("--tokens-per-rank" in said) == is_advised


def test_ranks_that_are_slow_alternately_count_as_equally_fast() -> None:
    slow = FACTS._replace(seconds=2.1)
    turns = [(FACTS, slow)] * 10 + [(slow, FACTS)] * 9
    found = [find(facts, None, plans=False) for facts in turns]
    said = "\n".join(Findings(found, 10.0).describe("flash"))
    assert "rank 1, in 10 of 19" in said
    assert "1.00 x the median rank" in said
    assert "balance" not in said, "documents are even"


def test_observer_uses_the_rates_of_the_gpu() -> None:
    """distca starts with the same rates on this GPU."""
    card = {"device": "NVIDIA H100 80GB HBM3", "attention": "flash_attention_3"}
    work = find([FACTS._replace(**card)], None, plans=False).work
    cost = make_gpu_cost(AttentionShape(32, 8, 128, 128, 2), "H200", "flash_attn_3")
    assert work.tolist() == pytest.approx([2 * float(cost.estimate_seconds(4096, 4096).sum())])


def test_figures_accept_a_rank_without_tokens() -> None:
    nothing = FACTS._replace(lengths=[], seconds=0.0)
    figures = add_up(FACTS._replace(lengths=[1]), nothing).compute_figures()
    assert figures["documents"] == 2.0
