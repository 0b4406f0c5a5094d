"""``python -m hf_distca.tools.run``: ``hf-distca run``, for launchers that start modules."""

import sys

from hf_distca.tools.cli import app

app(["run", *sys.argv[1:]], prog_name="hf-distca")
