"""The fastest settings that fit the card: method, checkpointing and the tokens of a batch are chosen by `sft_nb plan`.

    sft_nb train --config auto --model Qwen/Qwen3-4B --train-file rows.jsonl --eval-fraction 0.05
"""
from sft_nb.configs.default import *

max_tokens_per_batch = "auto"
effective_batch_size = 16
max_length = 2048
lora_dropout = 0.0  # its masks are a third of the activations
