"""``python -m hf_distca.run``: ``hf-distca run``, for launchers that start modules."""

import sys

from hf_distca.cli import app

app(["run", *sys.argv[1:]], prog_name="hf-distca")
