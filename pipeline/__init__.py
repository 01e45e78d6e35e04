"""Command line, configuration and one module per stage of the loop."""
