"""Code that connects distca with transformers, accelerate and the Trainer."""

# Import transformers here, before any module of this package. This import registers "distca", and
# the registration imports modules of this package. A module of this package that imported
# transformers first would still be half initialised when the registration imports it.
import transformers.modeling_utils  # noqa: F401
