"""State passing for hybrid models: linear attention and Mamba layers pass states from segment to
segment of a document. Hooks tell the layers of transformers where segments begin.
"""

# This import must come first, as in `integration`: it registers the hooks of this package.
import transformers.modeling_utils  # noqa: F401
