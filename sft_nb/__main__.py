"""`python -m sft_nb`: the command line."""
import sys

from sft_nb.cli import main

sys.exit(main())
