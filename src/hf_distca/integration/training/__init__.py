"""Parts of a training that a user names: callback, mixin, data sets of shares, figures.

May import `checks`, `hooks` and files beside this folder.
"""
