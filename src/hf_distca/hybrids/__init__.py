"""Hybrid models: the state passing of linear attention and Mamba layers between the segments of a
document, and the hooks that tell these layers of transformers where segments begin.
"""

# This import must come first, as in `integration`: it registers the hooks of this room.
import transformers.modeling_utils  # noqa: F401
