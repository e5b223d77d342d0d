"""The command line: thin commands over the other rooms. Nothing heavy is imported before a command runs."""
