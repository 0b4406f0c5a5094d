"""The runtime carries out a plan with torch. It does not depend on transformers."""
