"""Agreement of ranks on plans, and comparison of their measurements.

Knows no model; tested without one.
"""
