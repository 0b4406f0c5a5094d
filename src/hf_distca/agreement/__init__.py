"""Ranks agree on plans, and compare what they measured. Knows no model; tested without one."""
