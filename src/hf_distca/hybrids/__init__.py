"""Hybrid models: states that pass between the segments of a document, in linear attention and Mamba
layers, and the hooks that bring segments to these layers of transformers.
"""

# First of all, as in `integration`: with it, the hooks of this room are registered.
import transformers.modeling_utils  # noqa: F401
