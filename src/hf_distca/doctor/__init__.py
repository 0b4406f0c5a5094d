"""What keeps a machine, a model or a group of ranks from training under distca, and what to do about it."""
