"""`python -m sft_nb`: the command line."""
import sys

try: from sft_nb.cli import main
except ModuleNotFoundError as e:   # as with `python -S`
    if (e.name or "sft_nb").startswith("sft_nb"): raise
    sys.exit(f"sft_nb: {sys.executable}: there is no package {e.name}; all that sft_nb needs. "
             "Fix: pip install sft_nb, and run python without -S.")

sys.exit(main())
