"""Summaries of legal documents of up to 262,144 tokens, on four GPUs; ROUGE afterwards, of every checkpoint.

    sft_nb train --config long_summary --train-file data/train.jsonl --eval-file data/valid.jsonl
"""
from sft_nb.configs.default import *

task = "summarize"
model = "Qwen/Qwen3-4B"
method = "lora"
lora_r = 64
lora_alpha = 32
lora_target_modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
max_length = 262144
on_long = "drop"  # a longer document is left out and counted
per_device_train_batch_size = 1
per_device_eval_batch_size = 1
gradient_accumulation_steps = 8
gradient_checkpointing = True
activation_offloading = "auto"  # what checkpointing keeps waits in host memory, where it would not fit otherwise
num_processes = 4
learning_rate = 1e-4
max_grad_norm = 1.0
num_train_epochs = 1
eval_steps = 200
save_steps = 200
save_total_limit = 3
eval_samples = 50
max_new_tokens = 1024
# Put right: 262144 without a comma; rows are measured in tokens before anything is cut, so that no row loses its
# summary; the end of a turn is not padding and is learned; documents are joined as text. ZeRO-2 is left out, since what
# it divides is the optimiser's state of an adapter, which is small; deepspeed = "zero2", or the path of a file of its
# own, brings it back.
