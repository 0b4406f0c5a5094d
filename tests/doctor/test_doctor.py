"""Findings of the doctor that need action, and the action that it advises."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from transformers import AutoConfig, Gemma2Config, LlamaConfig

import hf_distca.kernels
from cli_runs import check_one_line, run, run_well
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.integration.session import Session
from hf_distca.kernels import flash
from hf_distca.package_versions import list_versions
from hf_distca.runtime.trial import exchange
from hf_distca.tools.doctor import Finding, State
from hf_distca.tools.doctor.exchange import describe_trial
from hf_distca.tools.doctor.model import (
    check_model_family,
    check_model_kernels,
    find_dtype,
    read_config,
)
from pages import words_of
from ranks import RankPools
from scripts import run as run_script

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def list_bad(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.state == "bad"]


@pytest.mark.parametrize(
    ("kind", "changes", "value", "state", "todo"),
    [
        ("llama", {}, "proven", "good", None),
        ("qwen3_next", {}, "recurrent layers are reset", "good", None),
        ("jamba", {}, "one document a row", "note", "give it one document a row"),
        ("mamba", {}, "not supported", "bad", 'Use attn_implementation="sdpa"'),
        ("t5", {}, "not supported", "bad", "encoder with a decoder"),
        ("vit", {}, "not in the table", "note", "compare its loss with that under sdpa"),
        ("llama", {"attention_dropout": 0.1}, "0.1", "bad", "set attention_dropout=0.0"),
        ("opt", {"layerdrop": 0.2, "attention_dropout": 0.0}, "on", "bad", "Set layerdrop=0.0"),
    ],
)
def test_findings_about_model_families_have_the_right_state_and_advice(
    kind: str, changes: dict[str, float], value: str, state: State, todo: str | None
) -> None:
    found = list(check_model_family(AutoConfig.for_model(kind, **changes)))
    worst = next((one for one in found if one.state != "good"), found[0])
    assert value in worst.value
    assert worst.state == state
    assert worst.todo is None if todo is None else todo in str(worst.todo)


def test_findings_include_documents_over_ranks_and_ping_pong() -> None:
    llama, whole = (
        {one.name: one.value for one in check_model_family(AutoConfig.for_model(kind))}
        for kind in ("llama", "llama4_text")
    )
    assert llama["documents over ranks"] == "exact"
    assert llama["ping-pong"] == "layers may run as nano-batches"
    assert whole["documents over ranks"].startswith("refused: they attend in chunks")


@pytest.fixture
def _one_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    hf_distca.kernels._check_once.cache_clear()
    monkeypatch.setattr(hf_distca.kernels, "mismatch_reason", lambda *case: None)
    monkeypatch.setattr(flash, "_import_once", lambda name: ImportError("not here"))


@pytest.mark.usefixtures("_one_hopper")
def test_doctor_advises_to_install_a_missing_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The findings name the reason why the faster kernel does not run. With a softcap, only the
    slow reference kernel is left.
    """
    monkeypatch.setattr(flash, "_find_version", lambda: None)
    runs, *others = check_model_kernels(LlamaConfig(), torch.bfloat16, CUDA)
    assert (runs.value, runs.state) == ("kernel 'cuda'", "good")
    assert str(runs.todo).endswith("is taken where it is installed: pip install flash-attn-4")
    reasons = {one.name: one.value for one in others}
    assert "install" in reasons["not 'flash_attn'"]
    found = check_model_kernels(Gemma2Config(), torch.bfloat16, CUDA)
    capped = [one for one in found if one.value.startswith("kernel")]
    assert {one.value for one in capped} == {"kernel 'reference'"}
    assert "pip install flash-attn" in str(capped[0].todo)
    assert len(capped) == 2, "layers with and without a window"


@pytest.mark.usefixtures("_one_hopper")
def test_float32_on_a_gpu_runs_a_slower_kernel_with_a_note() -> None:
    runs = next(check_model_kernels(None, torch.float32, CUDA))
    assert (runs.value, runs.state) == ("kernel 'efficient'", "note")
    assert "train in bfloat16 or float16" in str(runs.todo)


def test_cpu_runs_the_cpu_kernel_unless_there_is_a_softcap() -> None:
    (runs,) = check_model_kernels(LlamaConfig(), torch.float32, CPU)
    assert (runs.name, runs.value) == ("heads of 128, float32 on cpu", "kernel 'cpu'")
    slow = next(check_model_kernels(Gemma2Config(), torch.float32, CPU))
    assert "torch's fused CPU kernel has no softcap" in str(slow.todo)


def test_dtype_comes_from_the_option_the_config_or_the_device() -> None:
    assert find_dtype("bf16", None, CPU) is torch.bfloat16
    assert find_dtype(None, None, CPU) is torch.float32
    assert find_dtype(None, None, CUDA) is torch.bfloat16
    assert find_dtype(None, LlamaConfig(dtype="float16"), CPU) is torch.float16
    for name in ("bf17", "int8", "Tensor"):
        with pytest.raises(
            ConfigError, match=f"no attention in dtype '{name}': choose one of bf16, fp16"
        ):
            find_dtype(name, None, CPU)


def test_config_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    LlamaConfig(hidden_size=64, num_attention_heads=4).save_pretrained(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        assert read_config(str(name)).hidden_size == 64


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"there is no file .*config\.json: give the folder of a model"),
        ("{", r"cannot read .*config\.json as the config of a model: .* not a valid JSON file"),
        ("[]", "Should have a `model_type` key"),
        ("{}", "Should have a `model_type` key"),
        ('{"model_type": "llama77"}', "model type `llama77` .*pip install --upgrade transformers"),
        (
            '{"model_type": "llama", "num_hidden_layers": "many"}',
            "as the config of a model: .*num_hidden_layers.*int",
        ),
        ('{"model_type": "x", "auto_map": {"AutoConfig": "code.C"}}', "contains custom code"),
    ],
)
def test_unreadable_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config(str(tmp_path))


def test_wrong_path_is_not_looked_up_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("/no/such/folder", "./none", "config.json", "a/b/c"):
        with pytest.raises(ConfigError, match="there is no file"):
            read_config(name)


def test_name_missing_on_the_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, **options: bool) -> None:
        raise OSError(f"{name} is not a valid model identifier\nmore of it")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    said: list[str] = []
    with pytest.raises(
        ConfigError,
        match=r"the Hub has no config with this name: me/none is not a valid model identifier",
    ):
        read_config("me/none", said.append)
    assert said == ["asking the Hub for me/none; without a network, this fails after a minute ..."]


def exchange_here(has: dict[str, str]) -> list[Finding]:
    """Return the findings of a rank of a world that exists already."""
    group = Session(DistCAConfig(timeout_seconds=60.0), dist.group.WORLD).join_group()
    return describe_trial(exchange(has, CPU, group), group)


def exchange_without_pickle(rank: int) -> tuple[list[Finding], list[Finding]]:
    """Exchange with unpickling disabled: a pickle runs code in the process that reads it."""
    has = {"torch": "2.13.0", "numpy": "2.4.6" if rank else "2.1.0"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed_c10d, "_unpickler", None)
        return exchange_here(has), exchange_here({"torch": "2.13.0"})


def test_ranks_of_a_launcher_compare_their_versions(rank_pool: RankPools) -> None:
    for unequal, equal in rank_pool(2)(exchange_without_pickle):
        assert unequal[0].value == "2 ranks on 1 node, 2 on each"
        assert [(one.name, one.value) for one in list_bad(unequal)] == [
            ("numpy", "differs: 2.1.0 on rank 0, 2.4.6 on rank 1")
        ]
        assert not list_bad(equal)
        assert equal[-1].name == "exchange over gloo"
        assert "ms for 4 MB from each rank to each other" in equal[-1].value


def test_listed_versions_are_those_of_installed_packages() -> None:
    has = list_versions()
    assert has["torch"] == torch.__version__
    assert None not in has.values()


def exchange_in_containers(rank: int) -> str:
    """Exchange between two launchers on nodes with equal host names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("GROUP_RANK", str(rank))
        return exchange_here({})[0].value


def test_nodes_are_counted_by_launcher_not_by_host(rank_pool: RankPools) -> None:
    """Nodes may have equal host names, as containers do."""
    assert rank_pool(2)(exchange_in_containers) == ["2 ranks on 2 nodes, 1 on each"] * 2


def test_error_names_the_missing_launcher_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    result = run("doctor", "--timeout", "5")
    assert result.exit_code == 1, result.output
    assert "MASTER_ADDR expected, but not set" in result.stdout


@pytest.mark.parametrize(
    "words",
    [
        words_of("hf-distca doctor"),
        words_of("hf-distca doctor --model outputs/finetune_long_documents --dtype bf16"),
    ],
)
def test_doctor_commands_of_the_pages_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    LlamaConfig().save_pretrained(tmp_path / "outputs" / "finetune_long_documents")
    result = run_well(*words[1:])
    assert result.stdout.splitlines()[0] == ("model" if "--model" in words else "kernels")
    assert ("  documents over ranks       exact" in result.stdout) == ("--model" in words)


def test_doctor_prints_its_advice_at_the_end(tmp_path: Path) -> None:
    LlamaConfig(attention_dropout=0.1).save_pretrained(tmp_path)
    result = run("doctor", "--model", tmp_path, "--dtype", "bf16")
    assert result.exit_code == 1, "training would fail"
    assert "! attention_dropout          0.1" in result.stdout
    assert "what to do\n  1. " in result.stdout
    assert "set attention_dropout=0.0" in result.stdout.splitlines()[-2]
    assert "launch -m hf_distca.tools.cli doctor" in result.stdout.splitlines()[-1]


def test_json_output_lists_every_finding_and_action() -> None:
    result = run_well("doctor", "--json")
    found = json.loads(result.stdout)
    assert {one["section"] for one in found["findings"]} == {"kernels", "ranks"}
    assert len(found["to_do"]) == len([one for one in found["findings"] if one["todo"]]) >= 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("--model", "/none", "there is no file /none"),
        ("--timeout", "inf", "Invalid value for '--timeout'"),
        ("--timeout", "nan", "Invalid value for '--timeout'"),
        *(("--dtype", name, "'bf16'") for name in ("bf17", "", "BF16")),
    ],
)
def test_wrong_options_are_a_one_line_error(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "--dtype":  # refused before the diagnosis is imported
        monkeypatch.setitem(sys.modules, "hf_distca.tools.doctor.diagnosis", None)
    result = run("doctor", name, value)
    check_one_line(result, message)
    assert not result.stdout


@pytest.mark.slow
def test_only_rank_0_prints_under_a_launcher(tmp_path: Path) -> None:
    words = words_of(
        "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml -m"
        " hf_distca.tools.cli doctor"
    )
    text = run_script(words, tmp_path)
    assert text.count("attention group            2 ranks on 1 node, 2 on each") == 1
    assert "exchange over gloo" in text
