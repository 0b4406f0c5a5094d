"""Layers in ping-pong equal whole layers, and each document alone under sdpa in float64."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_parity import LENGTHS, build_model, draw_tokens, measure_error, run_alone, sum_losses
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import hf_distca
import tiny_runs
from checkpointed import checkpoint_layers
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks import nano_batch_layers
from hf_distca.integration.nano_batches import NanoBatches
from ranks import RankPools
from turns import in_turn

Rows = list[list[int]]  # the documents of each row of a batch

# Rows of document indices on each of three ranks.
PLACEMENTS: dict[str, list[Rows]] = {
    "skewed": [[[0, 3]], [[1, 2, 4]], [[5, 6]]],
    "one document each": [[[0]], [[4]], [[3]]],
    "a rank with one token": [[[0, 6]], [[1]], [[2, 4]]],
    "several rows, padded": [[[0], [4], [3]], [[2], [6]], [[5], [1]]],
    "all on one rank": [[[0, 1, 2, 3, 4, 5, 6]], [[]], [[]]],
}


def make_batch(rows: Rows) -> dict[str, torch.Tensor]:
    length = max([sum(LENGTHS[d] for d in row) for row in rows] + [3 if not any(rows) else 1])
    ids, positions = torch.zeros(2, len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.long)
    for place, row in enumerate(rows):
        at = 0
        for d in row:
            end = at + LENGTHS[d]
            ids[place, at:end], positions[place, at:end] = (
                draw_tokens(d, LENGTHS[d]),
                torch.arange(LENGTHS[d]),
            )
            mask[place, at:end] = 1
            at = end
    batch = {"input_ids": ids, "position_ids": positions}
    return batch if mask.all() else {**batch, "attention_mask": mask}


def configure(**settings: Any) -> None:
    hf_distca.configure(tiny_runs.settings(**{"ping_pong": True, **settings}))


def run_step(
    rank: int,
    placement: str,
    reentrant: bool | None,
    use_cache: bool,
    around: bool | None = None,
    settings: dict[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Train one step in float64; return loss and gradients summed over ranks, this rank's logits by
    document, counts and sent bytes.

    `reentrant` is for checkpoints of layers, and `around` for a checkpoint of the whole model; None
    is for no checkpoint.
    """
    configure(kernel="reference", **settings or {})
    rows = PLACEMENTS[placement][rank]
    model = build_model(2, "distca", torch.float64)
    if reentrant is not None:
        checkpoint_layers(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
    batch = make_batch(rows)
    if around is None:
        logits = model(**batch, use_cache=use_cache).logits
    else:
        embedded = model.get_input_embeddings()(batch.pop("input_ids"))
        embedded.requires_grad_()
        whole = partial(model, use_cache=use_cache, **batch)
        logits = checkpoint(lambda x: whole(inputs_embeds=x).logits, embedded, use_reentrant=around)
    pieces, losses = {}, [logits.sum() * 0]
    for place, row in enumerate(rows):
        at = 0
        for d in row:
            pieces[d] = logits[place, at : at + LENGTHS[d]]
            losses.append(sum_losses(pieces[d], draw_tokens(d, LENGTHS[d]), 0, LENGTHS[d]))
            at += LENGTHS[d]
    loss = torch.stack(losses).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    total = loss.detach()
    for tensor in (total, *grads.values()):
        dist.all_reduce(tensor)
    meter = current_session().meter
    counts = [meter.calls, meter.dispatches, meter.returns, meter.kernel_calls]
    return (
        float(total),
        {d: piece.detach() for d, piece in pieces.items()},
        grads,
        counts,
        meter.sent_bytes,
    )


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    ("reentrant", "use_cache"),
    in_turn([(None, False), (None, True), (True, False), (False, False)], 3, [(False, False)]),
)
def test_training_in_ping_pong_equals_documents_alone(
    rank_pool: RankPools, placement: str, reentrant: bool | None, use_cache: bool
) -> None:
    documents = tuple(sorted(d for rows in PLACEMENTS[placement] for row in rows for d in row))
    results = rank_pool(3)(run_step, placement, reentrant, use_cache)
    check_exact(results, documents)
    assert sum(sent for *_, sent in results) > 0, "nothing was exchanged, so nothing was tested"
    counts = [counts for *_, counts, _ in results]
    assert counts[0][1:] == counts[1][1:] == counts[2][1:]
    # In each layer, two halves have a dispatch and a return forward and backward, with or without a
    # recompute.
    assert counts[0][1:3] == [2 * 2 * 2, 2 * 2 * 2]


def check_exact(results: list[tuple[Any, ...]], documents: tuple[int, ...]) -> None:
    """Compare the results of `run_step` on all ranks with each document alone."""
    loss, logits, grads = run_alone(documents, 2, torch.float64)
    for total, pieces, rank_grads, *_ in results:
        assert total == pytest.approx(loss, rel=1e-9)
        for d, piece in pieces.items():
            assert measure_error(piece, logits[d]) <= 1e-9
        for name, grad in rank_grads.items():
            assert measure_error(grad, grads[name]) <= 1e-9, name


@pytest.mark.parametrize(
    ("layers", "around", "ping_pong"),
    in_turn(
        (
            (*where, halves)
            for where in ((None, False), (False, False), (None, True))
            for halves in (False, True)
        ),
        6,
        [(False, False, False), (None, True, True)],
    ),
)
def test_checkpoint_around_the_whole_model_is_exact(
    rank_pool: RankPools, ping_pong: bool, layers: bool | None, around: bool
) -> None:
    """Unless the checkpoint is reentrant, the recompute reuses the mask and repeats nothing."""
    plain, results = (
        rank_pool(3)(run_step, "skewed", *where, {"ping_pong": ping_pong})
        for where in ((None, False, None), (layers, False, around))
    )
    check_exact(results, tuple(range(7)))
    if not around:
        assert [counts[1:] for *_, counts, _ in results] == [n[1:] for *_, n, _ in plain]


@pytest.mark.parametrize("ping_pong", [False, True])
def test_max_transient_bytes_changes_exchanges_but_not_results(
    rank_pool: RankPools, ping_pong: bool
) -> None:
    bounded, settings = [], {"ping_pong": ping_pong, "max_transient_bytes": 60_000}
    for reentrant in (None, False):
        results = rank_pool(3)(run_step, "skewed", reentrant, False, None, settings)
        check_exact(results, tuple(range(7)))
        bounded += [counts[1:] for *_, counts, _ in results]
    assert all(counts[:2] == bounded[0][:2] for counts in bounded), (
        "every rank has the same number of exchanges"
    )
    assert bounded[:3] == bounded[3:], "the recompute repeats nothing"
    assert bounded[0][0] > 0, "nothing was exchanged, so nothing was tested"


def run_step_with_hooks(rank: int, ping_pong: bool, balance: bool = True) -> tuple[Any, ...]:
    """Train one step with hooks on a layer and collected hidden states."""
    configure(ping_pong=ping_pong, balance=balance)
    model = build_model(2, "distca", torch.float64)
    layer_calls, projected = [], []
    model.model.layers[0].register_forward_hook(
        lambda _, args, out: layer_calls.append(out.shape[1])
    )
    model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _, args, out: projected.append(out.shape[1])
    )
    with torch.autocast("cpu", enabled=False):
        out = model(**make_batch(PLACEMENTS["skewed"][rank]), output_hidden_states=True)
    (out.logits.square().mean() + out.hidden_states[1].sum()).backward()
    hidden = [state.detach() for state in out.hidden_states]
    return (
        hidden,
        {n: p.grad for n, p in model.named_parameters()},
        layer_calls,
        projected,
        current_session().meter.calls,
    )


def test_layer_hooks_and_hidden_states_see_one_call_per_layer(rank_pool: RankPools) -> None:
    pool = rank_pool(3)
    for (hidden, grads, layer_calls, projected, _), plain in zip(
        pool(run_step_with_hooks, True), pool(run_step_with_hooks, False), strict=True
    ):
        assert len(hidden) == len(plain[0])
        for one, other in zip(
            (*hidden, *grads.values()), (*plain[0], *plain[1].values()), strict=True
        ):
            assert measure_error(one, other.double()) <= 1e-9
        assert layer_calls == plain[2]
        assert len(projected) == 2
        assert sum(projected) == plain[3][0]


def test_layers_stay_whole_if_nothing_is_exchanged(rank_pool: RankPools) -> None:
    results = rank_pool(3)(run_step_with_hooks, True, False)
    # The first layer runs as two halves, and the second layer runs whole.
    assert all(calls == 3 for *_, calls in results)


def generate_tokens(rank: int, ping_pong: bool) -> list[int]:
    """Generate tokens with a model in training mode, together with the other ranks."""
    configure(ping_pong=ping_pong)
    model = build_model(2, "distca", torch.float64)
    prompt = draw_tokens(0, LENGTHS[0])[None]
    return model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
    )[0].tolist()


def test_generation_in_training_mode_is_the_same_in_ping_pong(rank_pool: RankPools) -> None:
    assert rank_pool(3)(generate_tokens, True) == rank_pool(3)(generate_tokens, False)


def train_with_prefix(
    rank: int, family: str, ping_pong: bool, several_rows: bool
) -> tuple[torch.Tensor, list[Any]]:
    """Run a prefix, then tokens that read the prefix from a cache; return logits and gradients."""
    configure(ping_pong=ping_pong)
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**tiny_runs.SIZES, head_dim=16, sliding_window=24)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="distca").double().train()
    ids = torch.stack([draw_tokens(row + rank, 60) % 61 for row in range(3 if several_rows else 1)])
    head = model(input_ids=ids[:, :40], use_cache=True)
    tail = model(input_ids=ids[:, 40:], past_key_values=head.past_key_values, use_cache=True)
    logits = torch.cat([head.logits, tail.logits], 1)
    logits.sin().sum().backward()
    return logits.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    ("family", "several_rows"), [("llama", False), ("llama", True), ("mistral", False)]
)
def test_training_through_a_cached_prefix_is_the_same_in_ping_pong(
    rank_pool: RankPools, family: str, several_rows: bool
) -> None:
    """Nano-batches fill the cache that a later call reads."""
    found, whole = (
        rank_pool(3)(train_with_prefix, family, ping_pong, several_rows)
        for ping_pong in (True, False)
    )
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)


def train_with_checkpoints(
    rank: int, placement: str, reentrant: bool | None, ping_pong: bool, part: str
) -> tuple[Any, ...]:
    """Train with a checkpoint around a part of each layer; return results, counts and runs."""
    configure(kernel="reference", ping_pong=ping_pong)
    rows = PLACEMENTS[placement][rank]
    model = build_model(2, "distca", torch.float64)
    runs: list[int] = []
    for layer in model.model.layers:
        inner = getattr(layer, part)
        inner.register_forward_pre_hook(lambda *_: runs.append(1))
        if reentrant is not None:
            kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
            setattr(layer, part, checkpoint_wrapper(inner, kind))
    logits = model(**make_batch(rows), use_cache=False).logits
    logits.square().sum().backward()
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): p.grad
        for name, p in model.named_parameters()
    }
    meter = current_session().meter
    return (
        logits.detach(),
        grads,
        [meter.calls, meter.dispatches, meter.returns, meter.kernel_calls],
        len(runs),
    )


@pytest.mark.parametrize("placement", ["skewed", "several rows, padded"])
@pytest.mark.parametrize(
    ("part", "reentrant"), in_turn(product(["self_attn", "mlp"], [True, False]), 2)
)
def test_checkpoints_around_parts_of_layers_repeat_no_exchange(
    rank_pool: RankPools, part: str, placement: str, reentrant: bool
) -> None:
    """A layer stays whole if only its attention is checkpointed."""
    pool = rank_pool(3)
    plain = pool(train_with_checkpoints, placement, None, part == "mlp", part)
    found = pool(train_with_checkpoints, placement, reentrant, True, part)
    for (logits, grads, counts, runs), (plain_logits, plain_grads, plain_counts, plain_runs) in zip(
        found, plain, strict=True
    ):
        assert measure_error(logits, plain_logits) <= 1e-9
        for name, grad in grads.items():
            assert measure_error(grad, plain_grads[name]) <= 1e-9, name
        assert counts[1:] == plain_counts[1:]
        assert runs == 2 * plain_runs, "nothing was recomputed, so nothing was tested"
    assert found[0][2][1] == (2 if part == "mlp" else 1) * 2 * 2


def measure_saved_bytes(rank: int, ping_pong: bool) -> tuple[int, int]:
    """Return the bytes that a forward saves for backward, without parameters, and calls of
    attention.

    Rank 0 has one document, and each other rank has eight.
    """
    configure(ping_pong=ping_pong)
    model = build_model(2, "distca", torch.float32)
    batch = tiny_runs.pack(*([192] if rank == 0 else [24] * 8))
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(**batch, use_cache=False).loss
    total = sum(
        tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in own
    )
    loss.backward()
    return total, current_session().meter.calls


@pytest.mark.parametrize("ping_pong", [False, True])
def test_saved_bytes_are_as_balanced_as_tokens(rank_pool: RankPools, ping_pong: bool) -> None:
    kept, calls = zip(*rank_pool(3)(measure_saved_bytes, ping_pong), strict=True)
    assert calls == ((4, 4, 4) if ping_pong else (2, 2, 2))
    assert max(kept) * len(kept) / sum(kept) <= 1.02, kept


class Broken(torch.nn.Module):
    """A projection that fails when it is called for the second half."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            raise ZeroDivisionError("the second half fails")
        return self.inner(hidden)


def run_failing_step(rank: int) -> tuple[list[str], bool, torch.Tensor, torch.Tensor]:
    """Run a step whose second half fails; return its traceback, and logits of two later steps."""
    configure()
    model = build_model(2, "distca", torch.float64)
    batch = make_batch(PLACEMENTS["skewed"][rank])
    attention = model.model.layers[1].self_attn
    whole, attention.o_proj = attention.o_proj, Broken(attention.o_proj)
    names: list[str] = []
    try:
        model(**batch)
    except ZeroDivisionError as error:
        frame = error.__traceback__
        while frame is not None:
            names.append(frame.tb_frame.f_code.co_name)
            frame = frame.tb_next
    grad_enabled, attention.o_proj = torch.is_grad_enabled(), whole
    after = model(**batch).logits
    after.square().mean().backward()
    configure(ping_pong=False)
    return names, grad_enabled, after.detach(), model(**batch).logits.detach()


def test_an_error_in_one_half_ends_both_and_keeps_its_traceback(rank_pool: RankPools) -> None:
    for names, grad_enabled, after, plain in rank_pool(3)(run_failing_step):
        assert names[-1] == "forward"
        assert "run_nano_batches" in names
        assert grad_enabled
        assert measure_error(after, plain) <= 1e-9


def train_sharded_parts(rank: int, part: str, ping_pong: bool) -> tuple[torch.Tensor, int]:
    """Train with a part of each layer as a separate FSDP unit; return logits and calls of
    attention.
    """
    configure(ping_pong=ping_pong)
    model = build_model(2, "distca", torch.float32)
    for layer in model.model.layers:
        fully_shard(getattr(layer, part))
        fully_shard(layer)
    fully_shard(model)
    logits = model(**make_batch(PLACEMENTS["skewed"][rank]), use_cache=False).logits
    logits.square().mean().backward()
    return logits.detach(), current_session().meter.calls


@pytest.mark.parametrize("part", ["self_attn", "mlp"])
def test_layer_whose_attention_is_an_fsdp_unit_stays_whole(rank_pool: RankPools, part: str) -> None:
    found = (rank_pool(3)(train_sharded_parts, part, cut) for cut in (True, False))
    for (got, calls), (want, whole) in zip(*found, strict=True):
        assert measure_error(got, want.double()) <= 1e-6
        assert calls == (whole if part == "self_attn" else 2 * whole)


def test_copies_of_a_model_with_cut_layers_have_its_original_classes() -> None:
    model = build_model(2, "distca", torch.float32)
    original = type(model.model.layers[0])
    nano_batch_layers.cut_layers(model.model)
    cut = type(model.model.layers[0])
    assert cut is not original
    assert cut.__name__ == original.__name__
    assert isinstance(model.model.layers[0], original)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin.model.layers[0]) is original
        nano_batch_layers.cut_layers(twin.model)
        assert type(twin.model.layers[0]) is cut
        assert twin.state_dict().keys() == model.state_dict().keys()


def test_unproven_model_family_stays_whole_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = build_model(2, "distca", torch.float32)
    model.model.config.model_type = "somebodys-own"
    before = type(model.model.layers[0])
    nano_batch_layers.cut_layers(model.model)
    assert type(model.model.layers[0]) is before
    assert "somebodys-own" in caplog.text


@pytest.mark.parametrize("rows", [1, 4])
def test_outputs_of_two_halves_are_joined_by_rows_or_tokens_or_refused(rows: int) -> None:
    local = TokenBatch(rows, 6, packed=PackedDocuments((6,) * rows)).read_documents()
    halves = NanoBatches.cut_batch((rows, 6), local, tile=1)
    whole = torch.randn(rows, 6, 5)
    first, second = (halves.select_part(nano, (whole, [whole[..., 0]], None)) for nano in (1, 2))
    joined, (inner,), nothing = halves.merge_outputs(first, second)
    assert torch.equal(joined, whole)
    assert torch.equal(inner, whole[..., 0])
    assert nothing is None
    # Router logits may have the shape (tokens, 1).
    tokens = [half[0].flatten(0, 1)[:, :1] for half in (first, second)]
    scalars = torch.tensor(1.0), torch.tensor(2.0)
    for pair in (tokens, scalars, (first[0], None), (first[0], [second[0]]), (whole, whole)):
        with pytest.raises(
            hf_distca.UnsupportedError, match="set DistCAConfig\\(ping_pong=False\\)"
        ):
            halves.merge_outputs(*pair)


def test_a_float_vector_with_the_length_of_the_batch_is_not_cut() -> None:
    documents = TokenBatch(1, 6, packed=PackedDocuments((6,))).read_documents()
    cut = NanoBatches.cut_batch((1, 6), documents, tile=1)
    width, positions = torch.randn(6), torch.arange(6)
    assert cut.select_part(1, width) is width
    assert [cut.select_part(nano, positions).tolist() for nano in (1, 2)] == [[0, 1, 2], [3, 4, 5]]
