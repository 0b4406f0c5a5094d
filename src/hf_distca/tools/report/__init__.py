"""The report of a run's folder, as one page that needs nothing else. It needs no torch."""
