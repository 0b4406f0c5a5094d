"""Model families in bfloat16, packed under distca and alone under transformers' own attention,
compared with float32.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from gpu_setting import Setting

TESTS = Path(__file__).parents[2] / "tests"
# A family passes if its error is at most TIMES the larger error of transformers' own attentions
# plus ABOVE. A router that selects other experts for a token makes a larger error than all
# rounding. It flips by chance under any attention.
TIMES, ABOVE = 2.0, 5e-3


def compare_norms(found: Any, expected: Any) -> dict[str, float]:
    """Compute the relative errors of the logits and of all gradients together."""

    def apart(pairs: list[tuple[torch.Tensor | None, torch.Tensor]]) -> float:
        off = sum(
            float(((0.0 if a is None else a.float()) - b.float()).square().sum()) for a, b in pairs
        )
        return (off / sum(float(b.float().square().sum()) for _, b in pairs)) ** 0.5

    names = [name for name, gradient in expected.grads.items() if gradient is not None]
    return {
        "logits": apart(list(zip(found.logits, expected.logits, strict=True))),
        "gradients": apart([(found.grads[name], expected.grads[name]) for name in names]),
    }


def one_family(setting: Setting, name: str) -> dict[str, Any]:
    """Compute the errors of distca and of transformers' own attentions in bfloat16."""
    import compare
    import tiny

    def outcome(implementation: str, dtype: torch.dtype, how: Any) -> Any:
        model = tiny.build(name, implementation, dtype).to(setting.device)
        documents = [document.to(setting.device) for document in compare.documents(compare.PACKED)]
        with torch.device(setting.device):
            return how(model, documents)

    with compare.quiet():
        parts = [
            module
            for module in tiny.build(name, "eager", torch.float32).modules()
            if isinstance(module, PreTrainedModel)
        ]
        # Inner models for pictures or sounds may lack sdpa even if the outer one has it.
        has_sdpa = all(part._supports_sdpa for part in parts)  # noqa: SLF001
        attentions = ("eager", "sdpa") if has_sdpa else ("eager",)
        expected = outcome("eager", torch.float32, compare.alone)
        plain = {
            attention: compare_norms(outcome(attention, torch.bfloat16, compare.alone), expected)
            for attention in attentions
        }
        ours = compare_norms(outcome("distca", torch.bfloat16, compare.packed), expected)
    passed = all(
        ours[figure] <= TIMES * max(errors[figure] for errors in plain.values()) + ABOVE
        for figure in ours
    )
    return {"family": name, "distca": ours, **plain, "passed": passed}


def run(setting: Setting) -> None:
    """Record one row per family, for as many families as there is time for."""
    sys.path[:0] = [str(TESTS), str(TESTS / "models")]
    from hf_distca.integration.families import FAMILIES

    names = sorted(name for name, status in FAMILIES.items() if status in ("PROVEN", "PACKED"))
    for name in names[: setting.size(quick=2, cpu=8, gpu=len(names))]:
        if not setting.has_time_for(name, cpu=5.0, gpu=2.0):
            continue
        try:
            row = one_family(setting, name)
        except Exception as error:  # a family that fails is also a result
            row = {"family": name, "failed": f"{type(error).__name__}: {error}"[:300]}
        setting.add("rows", row)
    judge_all(setting)


def judge_all(setting: Setting) -> None:
    """Record how many families passed; raise an error if none ran."""
    rows = setting.figures.get("rows", [])
    setting.put(passed=sum(row.get("passed", False) for row in rows))
    # A part without an error must have shown something.
    if rows and all("failed" in row for row in rows):
        raise RuntimeError(f"no family ran; the first error was: {rows[0]['failed']}")
