"""nli_cot with half the rows in a step: what worked best."""
from sft_nb.configs.nli_cot import *

gradient_accumulation_steps = 1
