"""The command line. `main` is the entry point of the `headway` command and of `python -m headway`."""

from headway.cli.app import main

__all__ = ["main"]
