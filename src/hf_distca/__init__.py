"""Core attention disaggregation for Hugging Face."""
