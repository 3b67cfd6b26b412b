"""The demo: a small model learns to solve word problems, with true 4-bit QLoRA, in about a minute on two CPU cores."""
from sft_nb.configs.default import *

task = "arithmetic"
model = "tiny"
method = "qlora"  # to show it; a model this small needs no 4 bits
max_length = 128
max_samples = 3000
num_train_epochs = 2
per_device_train_batch_size = 16
gradient_accumulation_steps = 1
learning_rate = 5e-3  # a model this small wants large steps
lora_dropout = 0.0
eval_samples = 300
per_device_eval_batch_size = 100
max_new_tokens = 40
