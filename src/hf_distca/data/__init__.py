"""Documents, global batches, shares, batches: the training data and its order.

No model, no processes.
"""
