"""The scheduler makes a plan from documents.

It is pure Python and numpy, and knows nothing of processes, devices or models.
"""
