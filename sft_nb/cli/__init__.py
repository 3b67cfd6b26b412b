"""The command line; the console script is `sft_nb.cli:main`."""
try: from .console import COMMANDS, main
except KeyboardInterrupt: raise SystemExit(130) from None

__all__ = ["COMMANDS", "main"]
