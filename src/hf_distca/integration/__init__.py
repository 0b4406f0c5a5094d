"""All code that knows transformers, accelerate or the Trainer."""

# This import registers "distca", which imports modules of this room. It must come before them: if
# one of them imported transformers first, that module would be found half made.
import transformers.modeling_utils  # noqa: F401
