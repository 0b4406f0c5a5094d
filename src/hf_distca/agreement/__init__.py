"""Ranks agree on plans, and share their measurements.

Nothing here needs a model.
"""
