"""The report of a run's folder, as one page without other files. No torch is needed to make it."""
