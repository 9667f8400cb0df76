"""The command line: one file a command, rich rendering, and nothing that a library user would miss."""
