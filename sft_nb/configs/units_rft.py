"""Unit conversion with the reasoning written out, from answers that were sampled and kept where they were right.

    sft_nb train --config units_rft --train-file data/rft.json --eval-file data/valid.json
"""
from sft_nb.configs.units import *

task = "units_rft"
lora_r = 16  # a chain of thought is more to learn than a number
lora_alpha = 32
max_length = 256  # the reasoning stands before the answer
learning_rate = 5e-4
max_new_tokens = 150
