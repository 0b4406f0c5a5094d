"""Documents, global batches, shares, batches: what ranks train on, and in which order. No model, no processes."""
