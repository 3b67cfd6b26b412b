"""nli_cot with a longer warm-up."""
from sft_nb.configs.nli_cot import *

warmup_steps = 0.05
