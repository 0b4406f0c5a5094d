from __future__ import annotations

import logging
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import hf_distca.kernels as kernels
from hf_distca.config import DistCAConfig, KernelName
from hf_distca.errors import KernelError
from hf_distca.kernels import Kernel, KernelRequest, ScoreOptions, flash, select_kernel
from hf_distca.kernels.flash import flash_reason
from pages import ROOT

SELECTED, MODULE = kernels._select_once, flash._import_once
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = ScoreOptions(0.1)
WINDOW = ScoreOptions(0.1, window=7)
BOTH = ScoreOptions(0.1, window=7, softcap=30.0)


def select(name: Any, *case: Any, ratio: int = 2) -> Kernel:
    return select_kernel(name, KernelRequest(*case, ratio))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the modules that can be imported, by name; all others cannot."""
    modules: dict[str, object] = {}
    monkeypatch.setattr(
        flash, "_import_once", lambda name: modules.get(name, ImportError("not here"))
    )
    return modules


@pytest.fixture(autouse=True)
def _forget_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget selections: tests change the installed packages, which a process does not."""
    monkeypatch.setattr(kernels, "_select_once", SELECTED.__wrapped__)
    kernels._check_once.cache_clear()


@pytest.fixture
def _new_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_logged", set())


@pytest.fixture
def _one_hopper(monkeypatch: pytest.MonkeyPatch, packages: dict[str, object]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(kernels, "mismatch_reason", lambda kernel, case: None)
    monkeypatch.setattr(kernels, "compile_failure_reason", lambda kernel, case: None)
    monkeypatch.setattr(flash, "_find_version", lambda: None)


def test_auto_selects_by_scores_on_a_cpu() -> None:
    assert select("auto", CPU, torch.bfloat16, 64, 64, PLAIN).name == "cpu"
    assert select("auto", CPU, torch.float64, 24, 16, PLAIN).name == "cpu"
    assert select("auto", CPU, torch.float32, 64, 64, WINDOW).name == "cpu"
    assert select("auto", CPU, torch.float32, 64, 64, BOTH).name == "reference"


def test_auto_selects_the_reference_on_other_devices() -> None:
    assert select("auto", torch.device("mps"), torch.float32, 64, 64, PLAIN).name == "reference"


@pytest.mark.usefixtures("_one_hopper")
def test_auto_selects_by_package_dtype_and_scores_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select("auto", CUDA, torch.bfloat16, 192, 128, PLAIN).name == "cuda"
    assert select("auto", CUDA, torch.float32, 64, 64, PLAIN).name == "efficient"
    assert select("auto", CUDA, torch.float16, 512, 512, PLAIN).name == "efficient"
    monkeypatch.setattr(flash, "_find_version", lambda: (2, 8, 3))
    assert select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN).name == "flash_attn"
    assert select("auto", CUDA, torch.bfloat16, 64, 64, BOTH).name == "flash_attn"
    monkeypatch.setattr(flash, "_find_version", lambda: (2, 6, 1))
    assert select("auto", CUDA, torch.bfloat16, 64, 64, WINDOW).name == "cuda"
    assert select("auto", CUDA, torch.bfloat16, 64, 64, BOTH).name == "reference"


def test_a_named_kernel_is_selected() -> None:
    assert select("reference", CPU, torch.float32, 64, 64, PLAIN).name == "reference"
    assert select("cpu", CPU, torch.float32, 64, 64, PLAIN) is select(
        "auto", CPU, torch.float32, 64, 64, PLAIN
    )


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        (
            "cuda",
            CPU,
            torch.bfloat16,
            r"'cuda' cannot run torch.bfloat16 .* on 'cpu'. Set kernel=\"auto\"",
        ),
        (
            "cpu",
            CUDA,
            torch.float32,
            "'cpu' cannot run torch.float32 tensors on cuda:0, with head dim 64",
        ),
        ("cpu", CPU, torch.float8_e4m3fn, "not in torch.float8_e4m3fn"),
        ("reference", CPU, torch.int32, "torch.int32 is not a floating dtype"),
        ("auto", CPU, torch.int64, "No kernel runs torch.int64 .*cpu: .*reference: "),
        (
            "triton",
            CPU,
            torch.float32,
            (
                "no kernel 'triton'; choose one of 'auto', 'flash_attn_4', 'flash_attn_3',"
                " 'kernels-community/flash-attn3', 'flash_attn', 'cuda', 'efficient', 'cpu',"
                " 'reference'"
            ),
        ),
    ],
)
def test_unusable_kernels_are_refused(
    name: str, device: torch.device, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(KernelError, match=message):
        select(name, device, dtype, 64, 64, PLAIN)


def test_flash_attn_4_alone_does_not_count_as_flash_attn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package has only `flash_attn.cute`, so Python imports `flash_attn` as a namespace."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    flash._find_version.cache_clear()
    try:
        with pytest.raises(
            KernelError, match="the package flash-attn is not installed: pip install flash-attn"
        ):
            select("flash_attn", CUDA, torch.bfloat16, 64, 64, PLAIN)
    finally:
        flash._find_version.cache_clear()


@pytest.mark.usefixtures("_one_hopper")
def test_flash_reason_names_head_dim_dtype_or_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    case = KernelRequest(CUDA, torch.bfloat16, 256, 256, PLAIN)
    assert flash_reason(case) is None
    assert "up to 256, got 264" in str(flash_reason(case._replace(head_dim=264)))
    assert "not in torch.float32" in str(flash_reason(case._replace(dtype=torch.float32)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "cuda:0 has 7.5" in str(flash_reason(case))


@pytest.mark.usefixtures("_one_hopper")
@pytest.mark.parametrize(
    "capability", [(8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1)]
)
def test_head_dims_are_refused_on_gpus_without_their_backward(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other GPUs, the op would raise in backward, after a successful forward."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(flash, "_find_version", lambda: (2, 8, 3))
    everywhere = capability in ((8, 0), (9, 0), (10, 0))
    for head_dim, value_head_dim in ((193, 128), (224, 224), (64, 200)):
        reason = flash_reason(KernelRequest(CUDA, torch.bfloat16, head_dim, value_head_dim, PLAIN))
        assert (reason is None) == everywhere
        limit = "193 to 224 on GPUs of compute capability 8.0, 9 and 10 only"
        assert everywhere or f"{limit}, cuda:0 has {capability[0]}." in reason
        name = select("auto", CUDA, torch.bfloat16, head_dim, value_head_dim, PLAIN).name
        assert name == ("flash_attn" if everywhere else "efficient")
    for head_dim in (192, 225, 256):
        assert flash_reason(KernelRequest(CUDA, torch.bfloat16, head_dim, head_dim, PLAIN)) is None


def test_every_kernel_can_be_set_and_is_on_the_settings_page() -> None:
    names = ["auto", *(kernel.name for kernel, _ in kernels._KERNELS)]
    assert sorted(get_args(KernelName)) == sorted(names), (
        "KernelName (config.py) and _KERNELS (kernels/__init__.py) differ"
    )
    section = (
        (ROOT / "docs" / "settings.md").read_text().split("\n## kernel\n")[1].split("\n## ")[0]
    )
    rows = re.findall(r'^\| `"(.*?)"` \|', section, flags=re.MULTILINE)
    assert rows == names, "the table of docs/settings.md has all kernels, in the order of _KERNELS"


@pytest.mark.usefixtures("_one_hopper", "_new_log")
def test_the_log_suggests_flash_attention_4_on_hopper_only(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        select("auto", CUDA, torch.float16, 64, 64, PLAIN)
        monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA3")
        select("auto", CUDA, torch.bfloat16, 64, 64, WINDOW)
    hopper, ampere, active = (record.getMessage() for record in caplog.records)
    assert "; FlashAttention 4 is made for Hopper GPUs" in hopper
    assert hopper.endswith("is taken where it is installed: pip install flash-attn-4")
    assert "FlashAttention 4 is made" not in ampere
    assert active.endswith(
        ", which is FA3 since torch.nn.attention.activate_flash_attention_impl was called"
    )


@pytest.mark.usefixtures("_one_hopper", "_new_log")
@pytest.mark.parametrize("case", ["named", "wrong"])
def test_flash_attention_4_is_not_suggested_if_installed_or_unwanted(
    case: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    packages: dict[str, object],
) -> None:
    if case != "named":
        packages["flash_attn.cute.interface"] = object()
    if case == "wrong":
        monkeypatch.setattr(
            kernels,
            "mismatch_reason",
            lambda kernel, case: "wrong" if kernel.name == "flash_attn_4" else None,
        )
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        name = "cuda" if case == "named" else "auto"
        assert select(name, CUDA, torch.bfloat16, 64, 64, PLAIN).name == "cuda"
    assert "is made for" not in caplog.text


@pytest.mark.usefixtures("_one_hopper")
def test_auto_prefers_the_newest_flash_attention_that_runs(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, object]
) -> None:
    monkeypatch.setattr(flash, "_find_version", lambda: (2, 8, 3))

    def chosen(scores: ScoreOptions = PLAIN, width: int = 64) -> str:
        return select("auto", CUDA, torch.bfloat16, width, width, scores).name

    assert chosen() == "flash_attn"
    packages["flash_attn_interface"] = object()
    assert chosen() == "flash_attn_3"
    packages["flash_attn.cute.interface"] = packages["kernels-community/flash-attn3"] = object()
    assert chosen() == chosen(BOTH) == "flash_attn_4"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert chosen() == chosen(width=256) == "flash_attn_4"
    assert chosen(width=192) == "flash_attn", (
        "FlashAttention 4 does not have this head dimension there"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert chosen() == "flash_attn"


def test_flash_attention_3_is_imported_by_either_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds from source install a module, wheels a package."""
    functions = object()

    def imported(name: str) -> object:
        if name != "flash_attn_3.flash_attn_interface":
            raise ModuleNotFoundError(f"No module named {name!r}")
        return functions

    monkeypatch.setattr(flash, "import_module", imported)
    flash._import_once.cache_clear()
    try:
        assert flash._import_once("flash_attn_interface") is functions
        assert (
            str(flash.import_error("flash_attn.cute.interface"))
            == "No module named 'flash_attn.cute.interface'"
        )
        monkeypatch.setattr(flash, "import_module", import_module)
        flash._import_once.cache_clear()
        assert str(flash.import_error()) == "No module named 'flash_attn_interface'"
    finally:
        flash._import_once.cache_clear()


@pytest.mark.usefixtures("_one_hopper")
def test_flash_attention_3_of_the_hub_is_loaded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    name, asked, functions = "kernels-community/flash-attn3", [], object()

    def get_kernel(repository: str, *, version: int) -> object:
        asked.append((repository, version))
        return SimpleNamespace(flash_attn_interface=functions)

    hub = {"kernels": SimpleNamespace(get_kernel=get_kernel)}
    monkeypatch.setattr(flash, "import_module", hub.__getitem__)
    monkeypatch.setattr(flash, "_import_once", cache(MODULE.__wrapped__))
    assert select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN).name == "cuda"
    assert not asked, "auto downloads nothing"
    assert select(name, CUDA, torch.bfloat16, 64, 64, BOTH) is flash.FLASH_ATTN_3_HUB
    assert flash._import_once(name) is functions
    assert asked == [(name, 1)]
    assert DistCAConfig(kernel=name).kernel == name


@pytest.mark.usefixtures("_one_hopper", "_new_log")
def test_a_kernel_that_fails_its_check_is_not_selected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, packages: dict[str, object]
) -> None:
    """Each case is checked once; a window or a softcap makes another case."""
    checked: list[tuple[str, bool]] = []

    def wrong(kernel: Kernel, case: KernelRequest) -> str | None:
        checked.append((kernel.name, case.scores.window is not None))
        return (
            "its results on cuda:0 are wrong: dq by 0.3"
            if checked[-1] == ("flash_attn_3", False)
            else None
        )

    packages["flash_attn_interface"] = object()
    monkeypatch.setattr(kernels, "mismatch_reason", wrong)
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        for _ in range(3):
            assert select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN).name == "cuda"
            assert select("auto", CUDA, torch.bfloat16, 64, 64, WINDOW).name == "flash_attn_3"
            assert (
                select("auto", CUDA, torch.bfloat16, 64, 64, ScoreOptions(0.3, window=99)).name
                == "flash_attn_3"
            )
    assert checked == [
        ("flash_attn_3", False),
        ("cuda", False),
        ("flash_attn_3", True),
    ]
    assert (
        "flash_attn_3: its results on cuda:0 are wrong: dq by 0.3; flash_attn: "
        in caplog.records[0].getMessage()
    )
    with pytest.raises(
        KernelError,
        match=r"'flash_attn_3' cannot run .*: its results on cuda:0 are wrong: dq by 0.3. Set",
    ):
        select("flash_attn_3", CUDA, torch.bfloat16, 64, 64, PLAIN)
    assert select("reference", CUDA, torch.bfloat16, 64, 64, PLAIN).name == "reference"
    assert len(checked) == 3


@pytest.mark.usefixtures("_one_hopper")
def test_a_kernel_whose_variants_do_not_compile_is_not_selected(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, object]
) -> None:
    packages["flash_attn.cute.interface"] = object()
    reason = "it cannot be compiled on cuda:0 (RuntimeError: no compiler)"
    monkeypatch.setattr(
        kernels,
        "compile_failure_reason",
        lambda kernel, case: reason if kernel is flash.FLASH_ATTN_4 else None,
    )
    assert select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN).name == "cuda"
    with pytest.raises(
        KernelError,
        match=r"'flash_attn_4' cannot run .*: it cannot be compiled on cuda:0 \(RuntimeError",
    ):
        select("flash_attn_4", CUDA, torch.bfloat16, 64, 64, PLAIN)


@pytest.mark.usefixtures("_one_hopper")
def test_kernels_are_checked_once_per_head_ratio_and_determinism(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels have separate code for each; one that is wrong for a ratio is skipped only there."""
    checked: list[int] = []

    def wrong(kernel: Kernel, case: KernelRequest) -> str | None:
        checked.append(case.gqa_ratio)
        return "wrong" if (kernel.name, case.gqa_ratio) == ("flash_attn", 8) else None

    def chosen(ratio: int) -> str:
        return select("auto", CUDA, torch.bfloat16, 64, 64, PLAIN, ratio=ratio).name

    monkeypatch.setattr(flash, "_find_version", lambda: (2, 8, 3))
    monkeypatch.setattr(kernels, "mismatch_reason", wrong)
    assert [chosen(ratio) for ratio in (1, 4, 8, 1, 4, 8)] == [
        "flash_attn",
        "flash_attn",
        "cuda",
    ] * 2
    assert checked == [1, 4, 8, 8], "the second check of 8 is that of the kernel 'cuda'"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [chosen(1), chosen(1)] == ["flash_attn"] * 2
    assert checked == [1, 4, 8, 8, 1]


def test_kernels_without_softcap_refuse_softcap(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        KernelError,
        match=r"tensors on cpu with window and softcap, .*CPU kernel has no softcap. Set kernel=",
    ):
        select("cpu", CPU, torch.float32, 64, 64, BOTH)
    monkeypatch.setattr(flash, "flash_reason", lambda case: None)
    with pytest.raises(
        KernelError,
        match=r"no softcap; the packages flash-attn and, on Hopper and Blackwell GPUs, flash-att",
    ):
        select("cuda", CUDA, torch.bfloat16, 64, 64, BOTH)


@pytest.mark.usefixtures("_new_log")
def test_the_selected_kernel_is_logged_once_per_case(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        for dtype in (torch.float32, torch.float32, torch.bfloat16):
            select("auto", CPU, dtype, 64, 64, PLAIN)
        for scores in (WINDOW, ScoreOptions(0.2, window=9), BOTH, BOTH):
            select("auto", CPU, torch.float32, 64, 64, scores)
    assert {record.levelname for record in caplog.records} == {"INFO"}
    assert [record.getMessage() for record in caplog.records] == [
        "core attention in torch.float32 on cpu runs in kernel 'cpu'",
        "core attention in torch.bfloat16 on cpu runs in kernel 'cpu'",
        "core attention in torch.float32 on cpu with window runs in kernel 'cpu'",
        "core attention in torch.float32 on cpu with window and softcap runs in kernel 'reference'"
        " (cpu: torch's fused CPU kernel has no softcap)",
    ]


@pytest.mark.usefixtures("_new_log", "_one_hopper")
@pytest.mark.parametrize(
    ("capability", "package", "advice"),
    [
        ((9, 0), None, "To speed it up, train in bfloat16 or float16 (bf16=True or fp16=True)."),
        (
            (8, 0),
            ImportError("none"),
            "and install flash-attn, a fast kernel with softcap (pip install flash-attn).",
        ),
    ],
    ids=["a Hopper that has it", "an Ampere"],
)
def test_the_advice_for_a_softcap_depends_on_the_gpu(
    capability: tuple[int, int],
    package: ImportError | None,
    advice: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for module in (kernels, flash):
        monkeypatch.setattr(module, "import_error", lambda name=None: package)
    select("auto", CUDA, torch.float32, 64, 64, BOTH)
    assert caplog.records[-1].getMessage().endswith(advice)


@pytest.mark.usefixtures("_new_log", "_one_hopper")
def test_the_reference_on_a_gpu_causes_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, logger="hf_distca"):
        for width in (64, 64, 512):
            select("auto", CUDA, torch.float32, width, width, BOTH)
        select("auto", CUDA, torch.float32, 64, 64, PLAIN)
        select("auto", CUDA, torch.bfloat16, 64, 64, BOTH)
        select("auto", CUDA, torch.bfloat16, 512, 512, PLAIN)
        select("auto", CUDA, torch.bfloat16, 64, 64, WINDOW)
        select("reference", CUDA, torch.float64, 64, 64, PLAIN)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3 + ["INFO"] * 3
    both_ways, types, softcap, width = (record.getMessage() for record in caplog.records[:4])
    assert "far slower than flash attention (flash_attn_4: it computes in bfloat16" in types
    assert types.endswith("To speed it up, train in bfloat16 or float16 (bf16=True or fp16=True).")
    assert "bf16=True" in both_ways
    assert both_ways.endswith(
        "and install flash-attn-4, a fast kernel with softcap (pip install flash-attn-4)."
    )
    assert "cuda: torch's flash attention has no softcap" in softcap
    assert "bf16=True" not in softcap
    assert "runs in kernel 'efficient' (flash_attn_4: head dimensions go up to 256" in width
