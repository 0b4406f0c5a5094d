"""Plugins for trainers that load them by name, one file for each trainer."""
