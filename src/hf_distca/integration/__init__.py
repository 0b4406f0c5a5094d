"""Code that connects distca with transformers, accelerate and the Trainer."""

# Importing transformers registers "distca", and the registration imports modules of this package.
# If the first import of transformers came from one of these modules, the registration would get
# that module half initialised. So transformers is imported here, before any of these modules.
import transformers.modeling_utils  # noqa: F401
