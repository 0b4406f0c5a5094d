"""The room that carries a plan out with torch. It knows nothing of transformers."""
