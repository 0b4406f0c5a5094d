"""State passing between the segments of a document, in linear attention and Mamba layers.

Knows nothing of transformers.

May import `schedule` and `runtime`.
"""
