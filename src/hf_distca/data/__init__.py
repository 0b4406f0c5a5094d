"""The training data and its order: documents, global batches, shares and batches.

Nothing here needs a model or torch.distributed.
"""
