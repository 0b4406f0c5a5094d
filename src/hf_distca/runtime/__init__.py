"""Carries out a plan with torch. Nothing here depends on transformers."""
