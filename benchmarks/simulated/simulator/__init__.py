"""Predictions of strategies at any scale, by the scheduler and the cost model that train. numpy
only, but for the counting of models: nothing is run.
"""
