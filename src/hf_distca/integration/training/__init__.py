"""Parts of training that a user calls: the callback, `deal`, data sets of shares, `place_rows`."""
