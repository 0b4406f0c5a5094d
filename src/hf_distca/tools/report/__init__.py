"""The report about a run's folder: a single file, which can be made without torch."""
