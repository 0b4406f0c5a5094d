"""Agreement of ranks on plans, and comparison of their measurements.

It knows no model, and is tested without one.
"""
