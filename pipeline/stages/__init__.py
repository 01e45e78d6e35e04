"""The stages of the loop, one module each; each reads a config and earlier outputs, and writes one directory."""
