"""Tools: the command line and what it runs. The core imports nothing of this room."""
