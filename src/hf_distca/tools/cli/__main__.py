"""``python -m hf_distca.tools.cli``: the command line, for launchers that start modules."""

from hf_distca.tools.cli import app

app(prog_name="hf-distca")
