"""The imports of `import hf_distca` and of the command line, in separate interpreters."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hf_distca

TESTS = Path(__file__).parent
# Packages that are slow or print messages, or whose import seems to use a device: accelerate's
# notebook_launcher takes an imported bitsandbytes for that.
HEAVY = ("torch", "transformers", "accelerate", "numpy", "peft", "bitsandbytes")


def run(code: str) -> dict[str, Any]:
    """Run a program and return the values in `seen` and its other output."""
    program = f"import json, sys, time\nseen = {{}}\n{code}\nprint(json.dumps(seen))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    *before, seen = done.stdout.splitlines()
    return {**json.loads(seen), "said": "".join(before) + done.stderr}


def test_import_of_hf_distca_loads_no_heavy_package_and_is_silent() -> None:
    seen = run(
        f"import hf_distca\nseen['loaded'] = [name for name in {HEAVY} if name in sys.modules]"
    )
    assert seen == {"loaded": [], "said": ""}


@pytest.mark.slow
def test_model_imported_after_hf_distca_loads_no_trainer() -> None:
    """distca registers while transformers is partly imported. Arguments of the Trainer would load
    peft there.
    """
    late = ("peft", "transformers.trainer", "transformers.training_args")
    models = "import torch, hf_distca\nfrom transformers import LlamaForCausalLM"
    seen = run(f"{models}\nseen['loaded'] = [name for name in {late} if name in sys.modules]")
    assert seen == {"loaded": [], "said": ""}


def test_call_after_import_waits_for_the_end_of_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_imported.py").write_text(
        "from hf_distca.import_hooks import call_after_import\n"
        "seen = []\n"
        "call_after_import(__name__, lambda: seen.append(last_line))\n"
        "last_line = 1\n"
    )
    # Use no import statement: transformers replaces itself in `sys.modules` during its import.
    package = importlib.import_module("transformers")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    assert importlib.import_module("transformers.half_imported").seen == [1]


def test_fork_ends_without_the_exit_calls_of_its_parent() -> None:
    """Forks, and forks of forks, end like interpreters, and run only their own exit calls."""
    code = (
        "import os\n"
        "from hf_distca.import_hooks import call_at_exit\n"
        "call_at_exit(lambda: print('of', os.getpid()))\n"
        "for _ in range(2):\n"
        "    os.fork() and os.wait()\n"
        "    call_at_exit(lambda: print('own', os.getpid()))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    lines = done.stdout.split("\n")[:-1]
    assert [line.split()[0] for line in lines].count("of") == 1
    assert len(set(lines)) == 5, "each of four processes prints one line, and the first one two"


@pytest.mark.slow
def test_hybrid_model_imported_first_separates_documents() -> None:
    """The modules that all models share load while the module of the model is partly imported."""
    seen = run(
        f"sys.path[:0] = {[str(TESTS), str(TESTS / 'models')]}\n"
        "import hf_distca\n"
        "from transformers.models.bamba.modeling_bamba import BambaForCausalLM\n"
        "import torch, compare, tiny\n"
        "model = tiny.build('bamba', 'distca', torch.float64)\n"
        "documents = compare.documents((9, 5))\n"
        "found = compare.packed(model, documents).logits\n"
        "expected = compare.alone(model, documents).logits\n"
        "seen['off'] = max(float((a - b).abs().max()) for a, b in zip(found, expected))"
    )
    assert seen["off"] < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DistCACallback", "configure", "PackingCollator", "deal"])
def test_any_public_name_can_be_used_first(name: str) -> None:
    """Registering imports modules, one of which may have started the import of transformers."""
    seen = run(
        f"import hf_distca\nhf_distca.{name}\nfrom transformers import AttentionInterface\n"
        "seen['registered'] = 'distca' in AttentionInterface._global_mapping"
    )
    assert seen["registered"]


def test_public_names_are_few_and_all_on_the_api_page() -> None:
    """Rarely used names stay in their modules. A new public name must replace another one."""
    assert len(hf_distca.__all__) <= 18
    assert {"deal", "DistCACallback", "DistCAConfig", "PackingCollator"} <= set(hf_distca.__all__)
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text()
    table = page[: page.index("\n## ")]
    assert set(re.findall(r"`([A-Za-z_]+)`", table)) - {"hf_distca"} == set(hf_distca.__all__), (
        "the page has exactly the public names"
    )
    first_page = table[: table.index("for experts")]
    assert set(re.findall(r"`([A-Za-z_]+)`", first_page)) - {"hf_distca"} == {
        "deal",
        "PackingCollator",
        "DistCACallback",
        "DistCAConfig",
    }


def test_every_public_name_can_be_imported() -> None:
    assert set(hf_distca.__all__) <= set(dir(hf_distca))
    for name in hf_distca.__all__:
        assert getattr(hf_distca, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'balance_figure'"):
        _ = hf_distca.balance_figure  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("DistCATrainerMixin", "DistCACallback"),
        ("pipeline", "import hf_distca.pipeline"),
        ("plan_ahead", "document_shares"),
        ("share_tokens", "document_shares"),
        ("trace", "torch.profiler"),
    ],
)
def test_removed_name_is_an_error_that_names_the_replacement(name: str, instead: str) -> None:
    with pytest.raises(AttributeError, match=rf"no attribute '{name}': .*{instead}"):
        hf_distca.__getattr__(name)  # attribute access would find an imported submodule


# Planning needs numpy.
LIBRARIES = ("torch", "transformers", "accelerate")


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("--help", HEAVY),
        ("plan --help", HEAVY),
        ("run --help", HEAVY),
        ("--version", HEAVY),
        ("plan -", LIBRARIES),
        ("advise --lengths - --ranks 2 --tokens-per-rank 4096 --batches 1", LIBRARIES),
    ],
)
def test_command_line_loads_no_heavy_package(command: str, without: tuple[str, ...]) -> None:
    given = b'{"lengths": [[4096], [512, 512]]}' if "plan" in command else b"[64]"
    seen = run(
        "import io\n"
        "from hf_distca.tools.cli import app\n"
        f"sys.stdin = io.TextIOWrapper(io.BytesIO({given!r}))\n"
        "try:\n"
        f"    app({command.split()!r})\n"
        "except SystemExit as end:\n"
        "    seen['code'] = end.code\n"
        f"seen['loaded'] = [name for name in {without} if name in sys.modules]"
    )
    assert (seen["code"], seen["loaded"]) == (0, [])
