"""Code that connects distca with transformers, accelerate and the Trainer."""

# Import transformers before any module of this package does. The import registers "distca", and the
# registration imports modules of this package. A module that was the first to import transformers
# would be half initialised then.
import transformers.modeling_utils  # noqa: F401
