"""The estimated seconds of a step in each way, and the advice that follows from them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError, LayoutError
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.load import PlanLoad
from hf_distca.schedule.ranks import Ranks
from hf_distca.tools.advise.advice import advise
from hf_distca.tools.advise.document_lengths import find_distribution, from_list
from hf_distca.tools.advise.known_models import KNOWN_MODELS
from hf_distca.tools.advise.ways import Run, Way, estimate_ways

TITLES = ["as it is", "samples balanced over ranks", "hf-distca, as given", "hf-distca, dealt"]
RATE = 1e14


def make_run(ranks: int = 8, tokens: int = 8192, **changes: bool | int) -> Run:
    model = KNOWN_MODELS["llama-3-8b"]
    ((shape, _, layers),) = model.layers
    cost = CostModel.make_analytic(shape)
    run = Run(model, ((cost, layers),), RATE, ranks, tokens, per_node=8, checkpointing=False)
    return replace(run, **changes)  # type: ignore[arg-type]


def estimate(run: Run, lengths: list[int]) -> dict[str, Way]:
    ways = estimate_ways(run, [np.array(lengths)])
    return {way.title: way for way in ways}


LONG = [32768, *[1024] * 32]


def test_estimates_of_each_way_equal_the_expected_seconds() -> None:
    """Expected seconds are computed by hand, and for hf-distca by the scheduler."""
    run = make_run()
    ways = estimate(run, LONG)
    cost, layers = run.costs[0]
    products = 6 * run.model.met_weights * 8192 / RATE

    def attention(length: int, count: int = 1) -> float:
        return layers * count * float(cost.estimate_seconds(length, length)[0])

    as_it_is, balanced = ways["as it is"], ways["samples balanced over ranks"]
    # The long document fills four rows, and each row counts as a document.
    assert as_it_is.seconds == pytest.approx(products + attention(8192))
    assert as_it_is.attention == pytest.approx(
        attention(8192) / (attention(8192, 4) + attention(1024, 32)) * 8
    )
    assert as_it_is.kept == pytest.approx(
        (4 * 8192**2 + 32 * 1024**2) / (32768**2 + 32 * 1024**2), rel=1e-3
    )
    assert balanced.most_tokens == 32768
    assert balanced.seconds == pytest.approx(4 * products + attention(32768))
    dealt, node = ways["hf-distca, dealt"], Ranks(per_node=8)
    layout = deal(LONG, 8, 8192, cost, ranks_per_node=8)
    load = PlanLoad(balance(layout, cost, DistCAConfig(), node), cost, ranks=node)
    assert dealt.seconds == pytest.approx(products + layers * load.slowest_seconds)
    assert dealt.keeps_documents
    assert dealt.most_tokens == ways["hf-distca, as given"].most_tokens == 8192
    assert ways["hf-distca, as given"].kept == pytest.approx(as_it_is.kept)
    assert ways["hf-distca, as given"].seconds < as_it_is.seconds < balanced.seconds


def test_context_parallelism_is_estimated_by_its_faster_kind() -> None:
    ways = estimate(make_run(), LONG)
    (title,) = ways.keys() - {*TITLES}
    assert title.startswith("context parallel")
    assert ways[title].keeps_documents
    slow = make_run()
    ((cost, layers),) = slow.costs
    slow = replace(slow, costs=((replace(cost, node_bytes_per_second=1e9), layers),))
    (slower,) = (way for name, way in estimate(slow, LONG).items() if name not in TITLES)
    assert slower.seconds > 1.5 * ways[title].seconds
    assert list(estimate(make_run(1, 65536), LONG)) == TITLES, "one rank has no other to share with"


def test_checkpointing_repeats_attention_except_under_hf_distca() -> None:
    once, twice = (
        estimate(make_run(checkpointing=checkpointing), LONG) for checkpointing in (False, True)
    )
    products = 2 * make_run().model.met_weights * 8192 / RATE
    for title in ("hf-distca, as given", "hf-distca, dealt"):
        assert twice[title].seconds == pytest.approx(once[title].seconds + products)
    assert twice["as it is"].seconds > once["as it is"].seconds + 1.02 * products


def test_ranks_that_exceed_the_largest_group_form_several_groups() -> None:
    """The busiest of two groups counts. Each group deals only its own documents."""
    one = estimate(make_run(512, 1024), [2048, *[1024] * 510])
    two = estimate(make_run(1024, 1024), [*[1024] * 512, 2048, *[1024] * 510])
    for title in ("hf-distca, as given", "hf-distca, dealt"):
        assert two[title].seconds == pytest.approx(one[title].seconds)


def test_layers_with_a_window_take_fewer_seconds() -> None:
    run = make_run()
    ((cost, layers),) = run.costs
    mixed = replace(run, costs=((cost, layers // 2), (replace(cost, window=1024), layers // 2)))
    for title, way in estimate(mixed, LONG).items():
        if title in TITLES:
            assert way.seconds < estimate(run, LONG)[title].seconds


def test_advice_for_long_documents_is_to_deal() -> None:
    run = make_run(32, checkpointing=True)
    lengths = next(find_distribution("prolong", 65536).draw_batches(32 * 8192, 1)).tolist()
    found = advise(run, list(estimate(run, lengths).values()))
    assert found.worthwhile
    assert found.ours == "hf-distca, dealt"
    assert "Ends of rows cut documents" in found.text
    assert found.settings[1:] == (
        "hf_distca.deal(trainer, tokens_per_rank=8192)",
        "# or: hf-distca run --attn-implementation distca --tokens-per-rank 8192 accelerate launch"
        " train.py",
    )


def test_advice_for_equal_documents_is_to_change_nothing() -> None:
    run = make_run()
    found = advise(run, list(estimate(run, [1024] * 64).values()))
    assert not found.worthwhile
    assert not found.settings
    assert found.text.endswith('hf-distca gains nothing over "as it is".')


@pytest.mark.parametrize(
    ("other", "gain", "said"),
    [
        ("samples balanced over ranks", 1.0, 'train_sampling_strategy="batch_rebalance")'),
        ("context parallel: Ulysses over 8 ranks", 1.01, "ParallelismConfig(sp_size=...)"),
        ("context parallel: ring over 8 ranks", 0.8, "no library for Hugging Face has"),
        ("as it is", 1.04, "The estimate may be wrong"),
        ("as it is", 1.2, "1.20 times as long"),
    ],
)
def test_advice_depends_on_the_gain_over_the_best_way(other: str, gain: float, said: str) -> None:
    def make_way(title: str, seconds: float) -> Way:
        return Way(title, 1.0, seconds, 0.0, 1.0, 8192)

    ways = [make_way("as it is", 2.0)] * (other != "as it is")
    ways += [make_way(other, gain), make_way(TITLES[2], 1.0), make_way(TITLES[3], 1.1)]
    found = advise(make_run(), ways)
    assert said in found.text
    assert found.worthwhile == (gain >= 1.06)
    assert bool(found.settings) == (gain >= 1.02)
    assert not any("deal" in line for line in found.settings), "as given is faster"


@pytest.mark.parametrize("text", ["pretrain", "prolong", "equal:1000", "lognormal:2000:1.5"])
def test_drawn_batches_have_exact_tokens_and_repeat_with_the_seed(text: str) -> None:
    documents = find_distribution(text, 65536)
    first, again, other = (
        [n.tolist() for n in replace(documents, seed=seed).draw_batches(300_000, 3)]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other or text == "equal:1000"
    assert [sum(n) for n in first] == [300_000] * 3
    assert max(itertools.chain(*first)) <= 65536
    assert min(itertools.chain(*first)) >= 1


def test_drawn_batches_have_the_known_share_of_long_documents() -> None:
    for name, share, boundary in (("pretrain", 0.5, 8192), ("prolong", 0.6, 16384)):
        lengths = next(find_distribution(name, 65536).draw_batches(50_000_000, 1))
        assert lengths[lengths > boundary].sum() / lengths.sum() == pytest.approx(share, abs=0.08)


def test_lengths_of_a_list_are_drawn_equally_often() -> None:
    batch = next(from_list([3, 5], "two").draw_batches(80, 1))
    assert np.bincount(batch[:20])[[3, 5]].tolist() == [10, 10]
    assert max(next(from_list([3, 500], "two", 10).draw_batches(80, 1))) == 10
    with pytest.raises(LayoutError, match="whole numbers"):
        next(from_list([1.5], "list").draw_batches(80, 1))


@pytest.mark.parametrize(
    "text", ["normal", "equal", "equal:0", "equal:nan", "lognormal:1", "lognormal:1:99"]
)
def test_unknown_distributions_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="neither a file nor one of pretrain, prolong"):
        find_distribution(text, 65536)
