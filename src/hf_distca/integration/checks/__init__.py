"""Checks of Trainers, loaders and losses: they raise or warn, and change nothing."""
