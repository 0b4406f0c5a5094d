"""A meter without balancing: attention imbalance over ranks, under any attention of transformers.

Models and their attention are only watched, and train as they would without it.

May import `agreement.documents`, `borrowed`, `integration.callers`, `integration.processes`,
`integration.training.callback`, `runtime.meter` and `schedule`.
"""
