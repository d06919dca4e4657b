"""The ``kvformat`` command: one module per subcommand, imported when it is asked for."""
