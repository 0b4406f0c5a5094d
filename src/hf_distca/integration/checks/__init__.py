"""Checks of Trainers, loaders and losses: they raise, or say why not, and change nothing."""
