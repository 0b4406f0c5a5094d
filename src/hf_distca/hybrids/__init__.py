"""State passing for hybrid models: linear attention and Mamba layers pass states from segment to
segment of a document. Hooks tell the layers of transformers where segments begin.
"""

# This import registers the hooks of this package, so it must come first (see `integration`).
import transformers.modeling_utils  # noqa: F401
