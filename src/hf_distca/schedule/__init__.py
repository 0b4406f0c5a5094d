"""The scheduler: documents in, plan out.

Pure Python and numpy: nothing here knows of processes, devices or models.
"""
