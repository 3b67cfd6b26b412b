"""nli_cot on two GPUs: as many rows in a step as on one, in half the time."""
from sft_nb.configs.nli_cot import *

num_processes = 2
per_device_train_batch_size = 8
gradient_accumulation_steps = 2
# Put right: a switch that took any text for true (`--distributed_training False`) is a number of processes.
