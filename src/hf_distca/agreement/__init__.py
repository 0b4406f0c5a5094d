"""Ranks agree on plans, and compare their measurements.

Nothing here needs a model.
"""
