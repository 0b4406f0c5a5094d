"""Carries a plan out with torch. Knows nothing of transformers."""
