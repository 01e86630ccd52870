"""The command line. Nothing here imports JAX before a command needs it, so help comes at once."""

from jaxserve.cli.command import main

__all__ = ["main"]
