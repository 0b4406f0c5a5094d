"""``hf-distca profile``: measured rates of this machine's attention kernel and links, for plans,
training and simulation.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_distca.errors import ConfigError
from hf_distca.tools.cli.files import check_place, exit_on_error, write
from hf_distca.tools.cli.options import with_options

if TYPE_CHECKING:
    from hf_distca.schedule.cost import KernelCost
    from hf_distca.schedule.profiles import Profile


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a profile: shapes and devices that are timed, and where the result goes."""

    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the profile goes, as JSON; standard output if left out."
        ),
    ] = None
    ranks: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Start so many processes on this machine, to time exchanges over gloo.",
            show_default=False,
        ),
    ] = None
    name: Annotated[str, typer.Option(help="What the profile is called.")] = "measured"
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="Dtype of q, k and v; may be repeated.", show_default="float32, bfloat16"
        ),
    ] = None
    width: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Width of a head; may be repeated.", show_default="64, 128"),
    ] = None
    heads: Annotated[
        list[str] | None,
        typer.Option(
            help="Query and key/value heads, as 8:2; may be repeated.", show_default="4:2, 8:1"
        ),
    ] = None
    device: Annotated[
        str | None, typer.Option(help="Device to time.", show_default="a GPU if there is one")
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of each process on a CPU.", show_default="as torch has it"
        ),
    ] = None
    batch_seconds: Annotated[
        float,
        typer.Option(min=0.0, max=60.0, help="Batches of tasks grow until they take so long."),
    ] = 0.04


@with_options(ProfileOptions)
@exit_on_error()
def profile(options: ProfileOptions) -> None:
    """Measure a profile: rates of the attention kernel and of exchanges, with their errors on
    shapes kept aside.

    Under torchrun or accelerate launch, the ranks that were started exchange, inside a node and
    between nodes; with --ranks, processes on this machine do; else kernels alone are timed, and
    exchanges are estimated by built-in figures. Give the file to --cost-model of plan and deal, and
    to DistCAConfig(cost_model=...).
    """
    from hf_distca.measure import machine_profile

    wanted = machine_profile.ProfileRequest(
        machine_profile.find_device(options.device),
        machine_profile.parse_dtypes(options.dtype or ["float32", "bfloat16"]),
        tuple(options.width or (64, 128)),
        _parse_heads(options.heads or ["4:2", "8:1"]),
        batch_seconds=options.batch_seconds,
    )
    check_place(options.output)  # before minutes of measuring are lost
    say = _ProgressBar(wanted.count_steps(options.ranks or machine_profile.count_launched_ranks()))
    made_by = shlex.join(["hf-distca", *sys.argv[1:]])
    what = (wanted, options.threads, options.name, made_by, say)
    measured = (
        machine_profile.measure_on_these_ranks(*what)
        if options.ranks is None
        else machine_profile.measure_on_new_ranks(options.ranks, *what)
    )
    say.close()
    if measured is not None:
        write(measured.to_json(), format_rates(measured), options.output)


class _ProgressBar:
    """A bar on standard error, which begins with the first step: until then it can be sent to the
    process that measures.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._bar: Any = None

    def __call__(self, done: str) -> None:
        from tqdm import tqdm

        self._bar = self._bar or tqdm(total=self.steps, file=sys.stderr, desc="profile")
        self._bar.set_postfix_str(done)
        self._bar.update()

    def close(self) -> None:
        """End the line of the bar."""
        if self._bar is not None:
            self._bar.close()


def _parse_heads(names: list[str]) -> tuple[tuple[int, int], ...]:
    heads = []
    for name in names:
        query, _, key_value = name.partition(":")
        if not (query.isdecimal() and key_value.isdecimal()):
            raise ConfigError(
                f"--heads {name}: give query heads and key/value heads as two numbers, such as 8:2."
            )
        heads.append((int(query), int(key_value)))
    return tuple(heads)


def format_rates(profile: Profile) -> str:
    """Format the rates in a few lines."""
    lines = [f"{'device':<26} {profile.processor}"]
    for rates in profile.kernels:
        what = f"{rates.kernel}, {rates.element_bytes} bytes, width {rates.head_dim}"
        speed = f"{_format_speed(rates.forward)} forward, {_format_speed(rates.backward)} backward"
        errors = f"{rates.errors['forward_median']:.1%} and {rates.errors['backward_median']:.1%}"
        lines.append(f"{what:<26} {speed}; median error on batches kept aside {errors}")
    for kind, link in (("inside a node", profile.inside), ("between nodes", profile.between)):
        if link is not None:
            error = f"; median error {link.errors['exchange_median']:.1%}" if link.errors else ""
            lines.append(
                f"{kind:<26} {link.bytes_per_second / 1e9:.3g} GB/s and"
                f" {link.seconds * 1e3:.3g} ms an exchange, {link.ranks} ranks{error}"
            )
    return "\n".join(lines)


def _format_speed(cost: KernelCost) -> str:
    """Format the limit of arithmetic, which a fit may leave out where bytes explain the seconds."""
    rate = cost.flops_per_second
    return f"{rate / 1e9:.4g} Gflop/s" if rate < float("inf") else "as fast as bytes come"
