"""Recurrent layers of hybrid models reset their states at packed documents."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from compare import Outcome, alone, difference, documents, finish, forward, packed, quiet
from tiny import build, lengthen_memory
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import DynamicCache, PreTrainedModel
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.nemotron_h import modeling_nemotron_h
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

import hf_distca
from checkpointed import checkpoint_layers
from document_keys import say_documents
from hf_distca import UnsupportedError
from hf_distca.agreement import documents as agreement_documents
from hf_distca.agreement.documents import DOCUMENT_KEYS, PackedDocuments
from hf_distca.hybrids import recurrent_layers
from hf_distca.integration.processes import warn_once
from host_syncs import NoHostSyncs
from turns import in_turn

LENGTHS = (70, 5, 1, 33)
KINDS = ("olmo_hybrid", "kimi_linear", "nemotron_h", "zamba2", "lfm2")
CLOSE = 2e-5  # the layers compute in float32


def get_model(model_type: str, implementation: str = "distca") -> PreTrainedModel:
    hf_distca.configure()
    with quiet():
        return lengthen_memory(build(model_type, implementation, torch.float64))


@cache
def expect(model_type: str, lengths: tuple[int, ...] = LENGTHS) -> Outcome:
    return alone(get_model(model_type, "sdpa"), documents(lengths))


def get_positions(lengths: tuple[int, ...] = LENGTHS) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def check(got: Outcome, want: Outcome) -> None:
    value, what = difference(got, want)
    assert value < CLOSE, f"{what} differs by {value:.1e}"


def wrap_layers(model: PreTrainedModel) -> None:
    """Wrap layers for checkpointing like the FSDP plugin of accelerate."""
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper(layer)


def checkpoint_reentrantly(model: PreTrainedModel) -> None:
    checkpoint_layers(model, use_reentrant=True)
    model.enable_input_require_grads()


CHECKPOINTING: dict[str, Callable[[PreTrainedModel], None]] = {
    "reentrant": checkpoint_reentrantly,
    "not reentrant": lambda model: checkpoint_layers(model, use_reentrant=False),
    "wrapped": wrap_layers,
}


@pytest.mark.parametrize(
    ("model_type", "checkpointing"),
    in_turn(itertools.product(KINDS, CHECKPOINTING), 4, [("nemotron_h", "not reentrant")]),
)
def test_recomputes_reset_states_at_the_same_documents(model_type: str, checkpointing: str) -> None:
    model = get_model(model_type)
    CHECKPOINTING[checkpointing](model)
    got = packed(model, documents(LENGTHS))
    grads = {
        name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.grads.items()
    }
    check(Outcome(got.loss, got.logits, grads), expect(model_type))


@pytest.mark.parametrize("model_type", in_turn(KINDS, 4, ["nemotron_h"]))
def test_micro_batches_in_flight_keep_their_own_documents(model_type: str) -> None:
    model, other = get_model(model_type), (9, 40, 60)
    checkpoint_layers(model, use_reentrant=False)
    graphs = []
    for lengths in (LENGTHS, other):
        docs = documents(lengths)
        logits = forward(model, torch.cat(docs)[None], get_positions(lengths))[0]
        graphs.append((docs, list(logits.split(list(lengths)))))
    got = [finish(model, docs, pieces) for docs, pieces in graphs]
    both = get_model(model_type, "sdpa")
    alone(both, documents(LENGTHS))
    check(got[1], alone(both, documents(other)))


@pytest.mark.parametrize("model_type", in_turn(KINDS, 3, ["nemotron_h"]))
def test_documents_in_padded_rows_equal_each_document_alone(model_type: str) -> None:
    docs = documents((20, 7, 30, 1, 9))
    pad = torch.full((5,), 40)
    rows = torch.stack([torch.cat([*docs[:2], pad, pad, pad[:3]]), torch.cat([*docs[2:]])])
    padded = torch.cat([get_positions((20, 7)), torch.arange(7, 20)[None]], 1)
    positions = torch.cat([padded, get_positions((30, 1, 9))])
    rows, positions = (torch.cat([part, part[:1]]) for part in (rows, positions))
    mask = torch.ones_like(rows)
    mask[0, 27:] = 0
    mask[2] = 0  # padding alone
    model = get_model(model_type)
    logits = forward(model, rows, positions, attention_mask=mask)
    pieces = [*logits[0, :27].split([20, 7]), *logits[1].split([30, 1, 9])]
    check(finish(model, docs, pieces), alone(get_model(model_type, "sdpa"), docs))


@pytest.mark.parametrize("model_type", in_turn(KINDS, 3, ["nemotron_h"]))
@pytest.mark.parametrize(
    "lengths", in_turn([pytest.param(lengths) for lengths in [(30, 10), (7, 33), (3, 20, 17)]], 3)
)
def test_documents_continue_in_the_next_row_if_lengths_span_rows(
    model_type: str, lengths: tuple[int, ...]
) -> None:
    docs = documents(lengths)
    model, rows = get_model(model_type), torch.cat(docs).view(2, 20)
    positions = get_positions(lengths).view(2, 20)
    logits = forward(model, rows, positions, distca_documents=PackedDocuments(lengths))
    pieces = list(logits.flatten(0, 1).split(list(lengths)))
    check(finish(model, docs, pieces), expect(model_type, lengths))


@pytest.mark.parametrize("key", DOCUMENT_KEYS)
def test_states_reset_at_documents_given_by_any_key(key: str) -> None:
    docs = documents((20, 7))
    model = get_model("lfm2")
    said = {key: say_documents((20, 7))[key]}
    logits = model(input_ids=torch.cat(docs)[None], use_cache=False, **said).logits
    check(finish(model, docs, list(logits[0].split([20, 7]))), expect("lfm2", (20, 7)))


@pytest.mark.parametrize("model_type", KINDS)
def test_evaluation_fills_no_cache_and_leaks_no_state(model_type: str) -> None:
    model = get_model(model_type).eval()
    model.config.use_cache = True
    docs = documents(LENGTHS)
    batch = {"input_ids": torch.cat(docs)[None], "position_ids": get_positions()}
    plain = get_model(model_type, "sdpa").eval()
    with torch.no_grad():
        logits = model(**batch).logits[0].split(list(LENGTHS))
        want = [plain(input_ids=doc[None], use_cache=False).logits[0] for doc in docs]
    for got, one in zip(logits, want, strict=True):
        torch.testing.assert_close(got, one, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        UnsupportedError,
        match=r"past_key_values, and 4 packed documents in 1 rows: .* Leave past_key_values out",
    ):
        model(**batch, past_key_values=DynamicCache(config=model.config))


@pytest.mark.parametrize("model_type", KINDS)
def test_generation_with_a_cache_is_the_same_as_with_sdpa(model_type: str) -> None:
    ids = torch.stack(documents((12, 12)))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left
    written = []
    for implementation in ("sdpa", "distca"):
        model = get_model(model_type, implementation).eval()
        with quiet():
            written.append(
                model.generate(
                    ids, attention_mask=mask, max_new_tokens=8, do_sample=False, use_cache=True
                )
            )
    assert torch.equal(*written)


@pytest.mark.parametrize("model_type", KINDS)
def test_models_with_other_attention_are_not_changed(model_type: str) -> None:
    with patch.object(
        recurrent_layers, "make_recurrent_rows", side_effect=AssertionError("asked for rows")
    ):
        leaking = packed(get_model(model_type, "sdpa"), documents(LENGTHS))
    assert difference(leaking, expect(model_type))[0] > 1e-2


@pytest.mark.parametrize("axes", [3, 4])
def test_documents_are_read_from_positions_on_several_axes(axes: int) -> None:
    docs = documents(LENGTHS)
    model, positions = get_model("qwen3_5_text"), get_positions().expand(axes, 1, -1)
    logits = forward(model, torch.cat(docs)[None], positions)[0]
    check(finish(model, docs, list(logits.split(list(LENGTHS)))), expect("qwen3_5_text"))


@pytest.mark.parametrize("given", ["positions", "lengths"])
def test_positions_are_read_once_a_micro_batch_or_never(given: str) -> None:
    """A read of positions on a device makes the host wait, so lengths on the host avoid it."""
    model, docs = get_model("nemotron_h"), documents(LENGTHS)
    batch: dict[str, Any] = {"input_ids": torch.cat(docs)[None], "position_ids": get_positions()}
    if given == "lengths":
        batch["distca_documents"] = PackedDocuments(LENGTHS)
    with patch.object(
        agreement_documents, "read_positions", side_effect=agreement_documents.read_positions
    ) as read:
        model(**batch, use_cache=False)
    assert read.call_count == (given == "positions")


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "bamba", "lfm2"])
def test_layers_never_make_the_host_wait(model_type: str) -> None:
    model, docs = get_model(model_type), documents(LENGTHS)
    mode, layers = NoHostSyncs(), model.model.layers
    with ExitStack() as forbidden:
        layers[0].register_forward_pre_hook(lambda *_: forbidden.enter_context(mode) and None)
        layers[-1].register_forward_hook(lambda *_: forbidden.close())
        batch = {"position_ids": get_positions(), "distca_documents": PackedDocuments(LENGTHS)}
        logits = model(input_ids=torch.cat(docs)[None], **batch, use_cache=False).logits
    with mode:
        logits.logsumexp(-1).sum().backward()


class Package:
    """A stand-in for fla, causal-conv1d and mamba-ssm, whose functions record their calls."""

    def __init__(self, rule: Any, convolution: Any, scan: Any) -> None:
        self.told: list[str] = []
        self.torch = {"rule": rule, "convolution": convolution, "scan": scan}

    def chunk_gated_delta_rule(
        self,
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Any = None,
        initial_state: Any = None,
        output_final_state: Any = False,
        use_qk_l2norm_in_kernel: Any = False,
        cu_seqlens: Any = None,
    ) -> Any:
        assert q.shape[0] == 1
        assert cu_seqlens.dtype == torch.int64
        self.told.append("rule from states" if initial_state is not None else "rule")
        out, last = [], []
        bounds = cu_seqlens.tolist()
        for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
            one, state = self.torch["rule"](
                *(states[:, begin:end] for states in (q, k, v, g, beta)),
                initial_state=None if initial_state is None else initial_state[number : number + 1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            )
            out.append(one)
            last.append(state)
        return torch.cat(out, 1), torch.cat(last) if output_final_state else None

    def causal_conv1d_fn(
        self, x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, activation: Any = None
    ) -> Any:
        if seq_idx is None:
            self.told.append("convolution")
            return self.torch["convolution"](x, weight, bias, activation)
        assert x.stride(1) == 1, "the package takes seq_idx where channels are last"
        self.told.append("convolution of seq_idx")
        return torch.cat(
            [
                self.torch["convolution"](part, weight, bias, activation)
                for part in _split(x, seq_idx, 2)
            ],
            2,
        )

    def mamba_chunk_scan_combined(
        self,
        x: Any,
        dt: Any,
        A: Any,  # noqa: N803
        B: Any,  # noqa: N803
        C: Any,  # noqa: N803
        chunk_size: int,
        D: Any = None,  # noqa: N803
        z: Any = None,
        dt_bias: Any = None,
        initial_states: Any = None,
        seq_idx: Any = None,
        dt_softplus: bool = False,
        dt_limit: Any = (0.0, float("inf")),
        return_final_states: bool = False,
    ) -> Any:
        assert z is initial_states is None
        more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        scan = self.torch["scan"]
        if seq_idx is None:
            self.told.append("scan")
            return scan(x, dt, A, B, C, chunk_size, return_final_states=return_final_states, **more)
        self.told.append("scan of seq_idx")
        parts = zip(*(_split(states, seq_idx, 1) for states in (x, dt, B, C)), strict=True)
        return torch.cat([scan(*part[:2], A, *part[2:], chunk_size, **more) for part in parts], 1)

    def mamba_split_conv1d_scan_combined(self, *args: Any, seq_idx: Any = None, **_: Any) -> None:
        self.told.append(f"both of {seq_idx.dtype}")  # None: the layer then calls both functions


def _split(states: torch.Tensor, seq_idx: torch.Tensor, dim: int) -> list[torch.Tensor]:
    assert seq_idx.dtype == torch.int32
    sizes = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
    return list(states.split(sizes, dim))


@contextmanager
def fake_package(module: ModuleType) -> Iterator[Package]:
    """Patch a modeling module as if the packages were installed."""
    before = {
        name: getattr(module, name, None)
        for name in recurrent_layers._REPLACEMENTS
        if hasattr(module, name)
    }
    torch_functions = {name: function.__wrapped__.__wrapped__ for name, function in before.items()}
    package = Package(
        *(
            torch_functions.get(n)
            for n in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn", "mamba2_chunk_scan")
        )
    )
    names = {
        "torch_chunk_gated_delta_rule": "chunk_gated_delta_rule",
        "mamba2_chunk_scan": "mamba_chunk_scan_combined",
        "mamba2_split_conv1d_scan_combined": "mamba_split_conv1d_scan_combined",
    }
    with patch.dict(sys.modules, {"fake_package": package}):  # type: ignore[dict-item]
        for name, function in torch_functions.items():
            decorated = use_kernel_func_from_hub_with_fallback(
                names.get(name, name), "fake_package"
            )(function)
            setattr(module, name, recurrent_layers._run_along_segments(decorated, name))
    try:
        yield package
    finally:
        for name, function in before.items():
            setattr(module, name, function)


PACKAGES = {
    "olmo_hybrid": (
        modeling_olmo_hybrid,
        {"rule", "convolution of seq_idx"},
        {"rule", "rule from states", "convolution"},
    ),
    "nemotron_h": (
        modeling_nemotron_h,
        {"both of torch.int32", "convolution of seq_idx", "scan of seq_idx"},
        {"convolution", "scan"},
    ),
}


RUNS = [lambda model: packed(model, documents(LENGTHS)), lambda model: run_pieces(model)]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("model_type", PACKAGES)
def test_kernels_of_packages_get_the_starts_of_documents(model_type: str, pieces: bool) -> None:
    """With `pieces`, the first document has three pieces, with other documents between them."""
    module, *told = PACKAGES[model_type]
    with fake_package(module) as package:
        got = RUNS[pieces](get_model(model_type))
    assert set(package.told) == told[pieces]
    check(got, expect(model_type))


# (module, function, argument) by which a mixer could pass an initial state.
STATES = {
    "olmo_hybrid": (modeling_olmo_hybrid, "torch_chunk_gated_delta_rule", "initial_state"),
    "kimi_linear": (modeling_kimi_linear, "chunk_kimi_delta_attention", "initial_state"),
    "nemotron_h": (modeling_nemotron_h, "mamba2_chunk_scan", "initial_states"),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model_type", STATES)
def test_initial_state_from_a_mixer_is_refused(
    model_type: str, run: Callable[[PreTrainedModel], Outcome]
) -> None:
    module, function, name = STATES[model_type]
    original = getattr(module, function)
    state = torch.zeros(1, 4, 16, 16)

    def hand_in(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **{**kwargs, name: state})

    with (
        patch.object(module, function, hand_in),
        pytest.raises(UnsupportedError, match=rf"runs its rule with {name}, but .*"),
    ):
        run(get_model(model_type))


@pytest.mark.parametrize("model_type", KINDS)
def test_cache_is_refused_for_documents_in_pieces(model_type: str) -> None:
    model = get_model(model_type)
    with pytest.raises(
        UnsupportedError,
        match=r"past_key_values, and 6 packed documents in 1 rows: .* Leave past_key_values out",
    ):
        run_pieces(model, past_key_values=DynamicCache(config=model.config))


PIECES = ((0, 0, 30), (1, 0, 5), (0, 30, 31), (2, 0, 1), (0, 31, 70), (3, 0, 33))


def run_pieces(model: PreTrainedModel, **extra: Any) -> Outcome:
    docs = documents(LENGTHS)
    numbers, starts, ends = zip(*PIECES, strict=True)
    sizes = [end - start for start, end in zip(starts, ends, strict=True)]
    row = torch.cat([docs[number][start:end] for number, start, end in PIECES])[None]
    positions = torch.cat([torch.arange(start, end) for _, start, end in PIECES])[None]
    logits = forward(
        model, row, positions, distca_documents=PackedDocuments(sizes, starts, numbers), **extra
    )[0].split(sizes)
    whole = [
        torch.cat([piece for piece, part in zip(logits, PIECES, strict=True) if part[0] == n])
        for n in range(len(docs))
    ]
    return finish(model, docs, whole)


@pytest.mark.parametrize("model_type", in_turn(KINDS, 3, ["zamba2"]))
def test_pieces_on_one_process_equal_whole_documents(model_type: str) -> None:
    check(run_pieces(get_model(model_type)), expect(model_type))


# A model of another version or with custom code gets no documents, or does not pass them on.
@pytest.mark.parametrize(
    ("where", "name"),
    [(recurrent_layers, "make_recurrent_rows"), (OlmoHybridGatedDeltaNet, "forward")],
)
def test_model_that_ignores_documents_is_warned_of_and_refused(
    where: Any, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    model, forward = get_model("olmo_hybrid"), OlmoHybridGatedDeltaNet.forward

    def forgetful(
        self: Any, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any
    ) -> Any:
        return forward(self, hidden_states, attention_mask=attention_mask)

    with (
        patch.object(where, name, forgetful if name == "forward" else lambda *_: None),
        caplog.at_level(logging.WARNING, "hf_distca"),
    ):
        packed(model, documents(LENGTHS))
        with pytest.raises(
            UnsupportedError,
            match="olmo_hybrid models need whole documents: their recurrent layers carry state",
        ):
            run_pieces(model)
    said = [
        record.getMessage()
        for record in caplog.records
        if "this batch has packed documents" in record.getMessage()
    ]
    assert len(said) == 1
    assert "Upgrade transformers" in said[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("model_type", ["olmo_hybrid", "bamba"])
def test_compiled_model_equals_each_document_alone(model_type: str) -> None:
    model = get_model(model_type)
    torch._dynamo.reset()
    model.model.compile(backend="eager")
    for lengths in (LENGTHS, (60, 49)):
        model.zero_grad()
        check(packed(model, documents(lengths)), expect(model_type, lengths))
