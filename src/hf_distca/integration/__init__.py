"""The room for all code that knows transformers, accelerate or the Trainer."""

# First of all, and here: with it "distca" is registered, which imports modules of this room. Were
# it imported by one of them, that one would be found half made.
import transformers.modeling_utils  # noqa: F401
