"""Documents, global batches, shares, batches: the training data and its order.

No model, no processes.

May import `schedule`, `agreement.dealt_share`, `agreement.document_starts` and
`agreement.documents`.
"""
