"""English to Arabic by domain: technology, economic or education; scored with BLEU and chrF.

    sft_nb train --config translate --domain technology --data_dir data/prepared
"""
from sft_nb.configs.default import *

task = "translate"
model = "Qwen/Qwen2-1.5B-Instruct"
method = "qlora"  # NF4 with double quantisation; --method lora turns it off
lora_r = 16
lora_alpha = 32
lora_dropout = 0.05
max_length = 512
per_device_train_batch_size = 4
gradient_accumulation_steps = 4
num_train_epochs = 3
learning_rate = 2e-4
warmup_steps = 0.03
optim = "paged_adamw_32bit"  # its state waits in host memory where a GPU is full
eval_steps = 100
save_steps = 100
save_total_limit = 2
load_best_model_at_end = True  # by the held-out loss; sweep says which checkpoint translates best
# Put right: the prompt is not trained, only the translation; an answer ends at the end of its turn, and is not cut out
# of a text at the word "assistant".
