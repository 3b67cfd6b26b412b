"""The command line; the console script is `sft_nb.cli:main`."""
from .console import COMMANDS, main

__all__ = ["COMMANDS", "main"]
