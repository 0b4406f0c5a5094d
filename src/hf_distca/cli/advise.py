"""``hf-distca advise``: what hf-distca would buy on documents of your own, or that it would buy nothing."""

from __future__ import annotations

import json
from textwrap import fill

import typer

from hf_distca.cli.files import InJson, errors_in_one_line
from hf_distca.cli.options import taking
from hf_distca.cli.scale import Scale
from hf_distca.cli.simulate import WIDTH, report, show_predictions

__all__ = ["advise"]


@taking(Scale)
def advise(scale: Scale, as_json: InJson = False) -> None:
    """Say what hf-distca would buy on your documents against the best alternative, or that it would buy nothing.

    The figures are predictions: `hf-distca simulate` with the same options prints what they assume.
    """
    from hf_distca.simulate.advice import advise as advised
    from hf_distca.simulate.assumptions import assumptions
    from hf_distca.simulate.strategies import STRATEGIES

    with errors_in_one_line():
        setting, documents = scale.setting(), scale.documents()
        predictions = scale.predictions(setting, documents, list(STRATEGIES))
        advice = advised(setting, predictions)
        if as_json:
            whole = report(setting, documents, predictions, assumptions(setting, documents), scale)
            typer.echo(json.dumps({"advice": advice.to_dict(), **whole}, indent=1))
            return
        typer.echo(fill(advice.text, WIDTH) + "\n")
        if advice.settings:
            typer.echo("Settings")
            typer.echo("".join(f"  {line}\n" for line in advice.settings))
        show_predictions(setting, documents, predictions, scale.batches)
