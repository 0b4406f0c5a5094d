"""Training interface: the callback, `deal`, data sets of shares, and `place_rows`."""
