"""Functions that transformers, models and Trainers call for attention, masks, layers and steps."""
