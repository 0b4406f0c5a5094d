"""Python executes this module when a process under ``hf-distca run`` starts, because this folder is
in front of the ``PYTHONPATH``.
"""

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec

# The environment may have its own `sitecustomize`, which this module hides: run it first.
_here = os.path.dirname(__file__)  # noqa: PTH120 - pathlib would slow every interpreter down
_hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _here])
if _hidden is not None and _hidden.loader is not None:
    _hidden.loader.exec_module(module_from_spec(_hidden))
if find_spec("hf_distca") is not None:  # false if this Python belongs to another environment
    try:
        from hf_distca.tools.run import Options, begin

        begin(Options.read(os.environ))
    except Exception as error:  # Python would continue without distca
        sys.stderr.write(f"hf-distca: `hf-distca run` cannot start this process: {error}\n")
        sys.stderr.flush()
        os._exit(2)
