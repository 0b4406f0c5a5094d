"""Predictions of strategies at any scale, by the scheduler and the cost model that train. numpy
only: nothing is run.

May import `model_shape` and `schedule`.
"""
