"""Checks of a model: the support of its family, and the kernel that runs its attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig

from hf_distca.errors import ConfigError, DistCAError, UnsupportedError
from hf_distca.integration.families import (
    FAMILIES,
    PING_PONG_FAMILIES,
    PROVEN_GROUPS,
    check_family,
    check_layerdrop,
    whole_document_reason,
)
from hf_distca.integration.layer_kinds import list_layer_keys
from hf_distca.kernels import (
    KernelRequest,
    ScoreOptions,
    is_slow,
    list_candidates,
    suggest_faster_kernel,
)
from hf_distca.tools.doctor import Finding

_SHORT_NAMES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
_DTYPES = _SHORT_NAMES | {
    str(dtype).removeprefix("torch."): dtype for dtype in _SHORT_NAMES.values()
}
_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_USUAL_WIDTH = 128  # width of a head if no model is given


def read_config(name: str, log: Callable[[str], None] = lambda text: None) -> PreTrainedConfig:
    """Read the config of a model.

    Args:
        name: folder of a model, its config.json, or a name on the Hub.
        log: called with a message before a step that takes a while.

    Raises:
        ConfigError: if there is no config, or if transformers does not know the model.
    """
    path = Path(name) / "config.json" if not name or Path(name).is_dir() else Path(name)
    is_file = path.is_file()
    is_path = path.suffix == ".json" or name.startswith((".", "/", "~")) or name.count("/") > 1
    if is_path and not is_file:
        raise ConfigError(
            f"there is no file {path}: give the folder of a model, its config.json, or a name on"
            " the Hub."
        )
    if not is_file:
        # Otherwise, huggingface_hub logs a dozen lines when it retries.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        log(f"asking the Hub for {name}; without a network, this fails after a minute ...")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(path) if is_file else name, trust_remote_code=False
        )
    except Exception as error:  # checks in configs raise exceptions of many kinds
        problem = (
            f"transformers cannot read {path} as the config of a model"
            if is_file
            else f"{name!r} is not a folder here, and the Hub has no config with this name"
        )
        raise ConfigError(f"{problem}: {' '.join(str(error).split())[:400]}") from error
    return config


def find_dtype(
    name: str | None, config: PreTrainedConfig | None, device: torch.device
) -> torch.dtype:
    """Return the dtype with this name. Without a name, return the dtype of the model, or, if the
    model has no dtype, the usual dtype of the device.

    Raises:
        ConfigError: if there is no such dtype.
    """
    if name is None:
        given = (
            None if config is None else getattr(config.get_text_config(decoder=True), "dtype", None)
        )
        usual = "float32" if device.type == "cpu" else "bfloat16"
        name = str(given or usual).removeprefix("torch.")
    if name not in _DTYPES:
        raise ConfigError(
            f"there is no attention in dtype {name!r}: choose one of {', '.join(_DTYPES)}."
        )
    return _DTYPES[name]


def check_model_family(config: PreTrainedConfig) -> Iterator[Finding]:
    """Yield findings about the model's family: whether distca computes its attention exactly, and
    which features work with it.
    """
    kind = config.model_type
    try:
        check_family(kind, encoder_decoder=config.is_encoder_decoder)
    except UnsupportedError as error:
        yield Finding("model", kind, "not supported", "bad", str(error))
        return
    group = FAMILIES.get(kind)
    if group is None:
        yield Finding(
            "model",
            kind,
            "not in the table of families, so not compared with sdpa",
            "note",
            "compare its loss with that under sdpa on one process before you rely on it",
        )
    else:
        plain = group in ("PROVEN", "PACKED")
        yield Finding(
            "model",
            kind,
            PROVEN_GROUPS[group],
            "good" if plain else "note",
            None if plain else "give it one document a row",
        )
        yield Finding(
            "model",
            "ping-pong",
            "layers may run as nano-batches"
            if kind in PING_PONG_FAMILIES
            else "layers never run as nano-batches",
        )
        whole = whole_document_reason(kind)
        yield Finding(
            "model", "documents over ranks", "exact" if whole is None else f"refused: {whole}"
        )
    yield from _check_config(config)


def _check_config(config: PreTrainedConfig) -> Iterator[Finding]:
    try:
        check_layerdrop(config)
    except UnsupportedError as error:
        yield Finding("model", "LayerDrop", "on", "bad", str(error))
    text = config.get_text_config(decoder=True)
    for name in _DROPOUT:
        value = getattr(text, name, None)
        if isinstance(value, int | float) and value > 0:
            yield Finding(
                "model",
                name,
                f"{value:g}",
                "bad",
                f"set {name}=0.0 in the model's config: distca refuses attention dropout in"
                " training",
            )


def check_model_kernels(
    config: PreTrainedConfig | None, dtype: torch.dtype, device: torch.device
) -> Iterator[Finding]:
    """Yield findings for each kind of layer in a model: the kernel that runs the layer, and the
    reasons why preferred kernels cannot run it.
    """
    if config is None:
        cases = [KernelRequest(device, dtype, _USUAL_WIDTH, _USUAL_WIDTH, ScoreOptions(1.0), 1)]
    else:
        try:
            keys = list_layer_keys(config, dtype, device.type)
        except DistCAError as error:
            yield Finding("kernels", "layers", str(error), "note")
            return
        text = config.get_text_config(decoder=True)
        softcap = getattr(text, "attn_logit_softcapping", None) or None
        cases = [
            KernelRequest(
                device,
                dtype,
                key.shape.head_dim,
                key.shape.value_head_dim,
                ScoreOptions(1.0, key.window, softcap),
                key.shape.heads_per_key_head,
            )
            for key in keys
        ]
    for case in dict.fromkeys(cases):
        yield from _check_case(case)


def _check_case(asked: KernelRequest) -> Iterator[Finding]:
    looked_at = [(kernel.name, reason) for kernel, reason in list_candidates(asked)]
    dtype = asked.dtype
    device = asked.device
    window = f", window {asked.scores.window}" if asked.scores.window else ""
    softcap = ", softcap" if asked.scores.softcap else ""
    on = f"{str(dtype).removeprefix('torch.')} on {device.type}"
    case = f"heads of {asked.head_dim}{window}{softcap}, {on}"
    running = next((name for name, reason in looked_at if reason is None), None)
    before = {name: reason for name, reason in looked_at if reason is not None}
    slow = running is not None and is_slow(running, dtype) and len(looked_at) > 1
    advice = None if running is None else suggest_faster_kernel(running, device)
    if running is None or slow:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in before.items())
        advice = f"only a slow kernel fits. {reasons}"
        if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
            advice = (
                "train in bfloat16 or float16 (bf16=True or fp16=True), for which there are fast"
                " kernels"
            )
    yield Finding(
        "kernels",
        case,
        f"kernel {running!r}",
        "bad" if running is None else "note" if slow else "good",
        f"{case}: {advice}" if advice else None,
    )
    for name, reason in before.items():
        yield Finding("kernels", f"not {name!r}", reason, "note")
