"""A meter of the imbalance of attention over ranks, under any attention of transformers.

It only watches models and their attention: they train as they would without it.
"""
