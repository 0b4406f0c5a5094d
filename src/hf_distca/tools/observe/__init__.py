"""A meter without balancing: attention imbalance over ranks, under any attention of transformers.

Models and their attention are only watched, and train as they would without it.
"""
