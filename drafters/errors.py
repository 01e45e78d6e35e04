"""The one exception a user should ever read."""

from __future__ import annotations


class UserError(ValueError):
    """Bad input from outside: a file, a config value, a checkpoint, a server.

    The message names the path or dotted config key at fault and how to fix it. The command line prints it as
    one line, without a traceback, and exits with code 2.
    """
