"""Checks of Trainers, loaders and losses: they raise, or say why not, and change nothing.

May import files beside this folder.
"""
