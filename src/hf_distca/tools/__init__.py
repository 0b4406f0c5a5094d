"""Tools: the command line and the code that it runs. The core does not import this package."""
