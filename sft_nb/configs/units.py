"""Unit conversion: a short question, a number in `<answer>…</answer>`, right within 5%; with a very small model.

    sft_nb train --config units --train-file data/train.json --eval-file data/valid.json
"""
from sft_nb.configs.default import *

task = "units"
model = "HuggingFaceTB/SmolLM2-360M-Instruct"
method = "lora"  # 360M parameters are small enough to stay in 16 bits
lora_r = 8
lora_alpha = 16
max_length = 128
on_long = "drop"  # a row that is cut loses its answer
per_device_train_batch_size = 32
gradient_accumulation_steps = 1
gradient_checkpointing = True  # less memory, slower
learning_rate = 2e-4
num_train_epochs = 3
save_steps = "epoch"
save_total_limit = 1
max_new_tokens = 50
# Put right: labels are made here, so no trainer has to find them (the loss was 0); weights stay in bfloat16 or float32,
# never float16 under a scaler (the gradient was NaN); an answer that is not in its tags is not scored as a number.
