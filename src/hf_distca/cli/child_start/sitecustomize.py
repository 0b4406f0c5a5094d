"""Start-up of Python processes that ``hf-distca run`` starts: this folder is in front of their
``PYTHONPATH``.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

# The environment may have a module of this name, which runs as it would without this one.
_here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would slow every interpreter down
_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _here])
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
try:
    from hf_distca.run import Options, begin
except (
    ImportError
):  # an interpreter of another environment, which then has no models that could run under distca
    pass
else:
    begin(Options.read(os.environ))
