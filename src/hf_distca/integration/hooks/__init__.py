"""Functions that transformers, models and Trainers call: attention, masks, layers, steps."""
