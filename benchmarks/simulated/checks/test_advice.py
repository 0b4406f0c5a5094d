"""`hf-distca advise` compared with the simulator, which also counts memory traffic between
products, weights and their exchange, copies of moved rows, and kernel calls.
"""

from __future__ import annotations

import pytest

from hf_distca.tools.advise.document_lengths import find_distribution
from hf_distca.tools.advise.ways import estimate_ways
from hf_distca.tools.cli.advise import Options
from simulator.hardware import find_hardware
from simulator.model_shape import find_model
from simulator.predict import simulate
from simulator.setting import Setting

SAME = {
    "as it is": "plain",
    "samples balanced over ranks": "lpt",
    "hf-distca, as given": "given",
    "hf-distca, dealt": "dealt",
}


@pytest.mark.parametrize(
    ("model", "hardware", "ranks", "tokens", "lengths", "longest", "checkpointing"),
    [
        ("llama-3-8b", "h100", 64, 65536, "prolong", 131072, True),
        ("llama-3-8b", "h100", 8, 16384, "pretrain", 32768, False),
        ("qwen3-32b", "b200", 32, 32768, "prolong", 131072, True),
        ("llama-3.2-1b", "a100", 8, 8192, "lognormal:1000:1", 8192, True),
        ("llama-3-70b", "h200", 256, 32768, "pretrain", 262144, True),
        ("qwen3-8b", "h100", 8, 32768, "equal:2048", 65536, True),
    ],
)
def test_advise_estimates_steps_and_gains_like_the_simulator(
    model: str,
    hardware: str,
    ranks: int,
    tokens: int,
    lengths: str,
    longest: int,
    checkpointing: bool,
) -> None:
    documents = find_distribution(lengths, longest)
    setting = Setting(
        find_model(model),
        find_hardware(hardware),
        ranks,
        tokens,
        checkpointing="full" if checkpointing else "none",
    )
    steps = simulate(setting, documents, SAME.values(), batches=3)
    predicted = {step.strategy: step.step_seconds for step in steps}
    run = Options(lengths, ranks, tokens, model, hardware, checkpointing=checkpointing).make_run()
    ways = estimate_ways(run, documents.draw_batches(ranks * tokens, 3))
    estimated = {way.title: way.seconds for way in ways}
    for title, name in SAME.items():
        assert 0.88 < estimated[title] / predicted[name] < 1.01, title
        gain = estimated["as it is"] / estimated[title]
        # The costs that advise leaves out reduce the gain by up to 3.0 %, for ranks with few tokens
        # (llama-3-8b on 8 GPUs).
        assert gain == pytest.approx(predicted["plain"] / predicted[name], rel=0.035), title
