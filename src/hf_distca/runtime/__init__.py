"""Carries a plan out with torch. Nothing here depends on transformers."""
