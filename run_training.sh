#!/bin/sh
# A training from a shell, with the options of `sft_nb train`: ./run_training.sh --config nli_cot --gpu 1 --batch_size 4
exec "${PYTHON:-python3}" -m sft_nb train "$@"
