"""nli_cot with half the rows in a step and half the learning rate."""
from sft_nb.configs.nli_cot import *

gradient_accumulation_steps = 1
learning_rate = 1e-4
