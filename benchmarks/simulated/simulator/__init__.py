"""Predictions of strategies at any scale, by the scheduler and the cost model of training. Nothing
is run, and only counting a model's weights needs more than numpy.
"""
