"""Everything that knows transformers, accelerate or the Trainer."""
