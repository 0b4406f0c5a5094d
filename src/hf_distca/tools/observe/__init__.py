"""A meter for the imbalance of attention over ranks, for any attention implementation.

It only watches models and their attention, and does not change the training.
"""
