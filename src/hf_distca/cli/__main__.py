"""``python -m hf_distca.cli``: the command line, for launchers that start modules."""

from hf_distca.cli import app

app(prog_name="hf-distca")
