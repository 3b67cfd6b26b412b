"""nli_cot as a trial: is everything there? A few rows, a small adapter, some minutes."""
from sft_nb.configs.nli_cot import *

max_samples = 100
max_length = 256  # drops rows with long thoughts
lora_r = 8
lora_alpha = 16
per_device_train_batch_size = 1
gradient_accumulation_steps = 1
num_train_epochs = 1
eval_steps = 50
eval_samples = 20
early_stopping_patience = None
