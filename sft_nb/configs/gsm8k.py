"""Grade-school math word problems (Cobbe et al., 2021), with a small instruct model on one GPU.

    sft_nb train --config gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --max-samples 500 --wandb
"""
from sft_nb.configs.default import *

task = "gsm8k"
model = "Qwen/Qwen2.5-0.5B-Instruct"
max_length = 512  # two training rows of 7473 are longer in Qwen tokens
per_device_train_batch_size = 2
gradient_accumulation_steps = 16
learning_rate = 5e-5
warmup_steps = 10
num_train_epochs = 3
max_new_tokens = 400
