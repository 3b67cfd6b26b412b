"""nli_cot with twice the rank and twice the rows in a step; it did not learn better."""
from sft_nb.configs.nli_cot import *

gradient_accumulation_steps = 4
learning_rate = 1e-4
warmup_steps = 0.10
lora_r = 32
lora_alpha = 64
max_grad_norm = 1.0
