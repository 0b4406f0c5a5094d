"""Strategies at any scale, predicted from the scheduler and the cost model that train. numpy only: nothing is run."""
