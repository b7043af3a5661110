"""Windows below the command line: firing, runs, changes, maintenance, the register of nodes, commands."""
