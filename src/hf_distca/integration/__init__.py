"""Code that connects distca with transformers, accelerate and the Trainer."""

# This import registers "distca", and the registration imports modules of this package. If one of
# these modules were the first to import transformers, the registration would find this module half
# initialised.
import transformers.modeling_utils  # noqa: F401
