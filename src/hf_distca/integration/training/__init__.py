"""Parts of a training that a user names: callback, mixin, data sets of shares, figures."""
