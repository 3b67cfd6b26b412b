"""Natural language inference with reasoning: `{"thought_process": …, "predicted_label": 0 or 1}`, with Mistral 7B.

    sft_nb train --config nli_cot --train-file data/finetune/train_ft.jsonl --eval-file data/finetune/dev_ft.jsonl
"""
from sft_nb.configs.default import *

task = "nli"
model = "mistralai/Mistral-7B-v0.3"
chat_template = "mistral"  # [INST] … [/INST]: the base has none of its own
method = "qlora"
lora_r = 16
lora_alpha = 32
lora_dropout = 0.05
lora_target_modules = ("q_proj", "k_proj", "v_proj", "o_proj")
max_length = 512
per_device_train_batch_size = 16
gradient_accumulation_steps = 2
gradient_checkpointing = True
optim = "paged_adamw_8bit"
learning_rate = 2e-4
lr_scheduler_type = "cosine"
warmup_steps = 0.03
weight_decay = 0.01
eval_steps = 250
save_steps = 250
save_total_limit = 2
early_stopping_patience = 3
max_new_tokens = 512
# Put right: only the answer is trained, not the whole text; an answer that cannot be read is an outcome of its own, not
# label 1; bfloat16 and checkpointing go together without a patch of `forward`.
