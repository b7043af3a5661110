"""The statements of windows, each under a name, and the tables they work on."""
