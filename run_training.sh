#!/usr/bin/env bash
# A training from a shell, with the options of `sft_nb train`: ./run_training.sh --config nli_cot --gpu 1 --batch_size 4
#
# In a container where Docker has the image ($IMAGE, else sft_nb; `docker build -t sft_nb .` makes it), otherwise with this
# Python. --dry-run prints the `docker run` line. The project is /app; /data, /models and /hf_cache are $DATA_DIR (./data),
# $MODELS_DIR (./models) and $HF_HOME; --gpu chooses the card, and .env is passed on.
set -euo pipefail

image=${IMAGE:-sft_nb} gpus=all dry_run="" has_config=""
forwarded=()
while (($#)); do
    case $1 in
        --dry-run|--dry_run) dry_run=1 ;;
        --gpu) gpus="\"device=${2:?"--gpu needs a number"}\""; shift ;;
        --gpu=*) gpus="\"device=${1#--gpu=}\"" ;;
        *) [[ $1 == --config || $1 == --config=* || $1 == --resume* || $1 == --help ]] && has_config=1
           forwarded+=("$1") ;;
    esac
    shift
done
[[ -z $has_config && -f train/configs/default.py ]] && forwarded=(--config train/configs/default.py "${forwarded[@]}")

if [[ -z $dry_run ]] && { [[ -n ${PYTHON:-} ]] || ! docker image inspect "$image" >/dev/null 2>&1; }; then
    [[ $gpus == all ]] || forwarded+=(--gpu "$(tr -dc '0-9,' <<<"$gpus")")
    exec "${PYTHON:-python3}" -m sft_nb train "${forwarded[@]}"
fi

line=(docker run --rm --gpus "$gpus" --shm-size 8g -v "$PWD:/app" -w /app)
line+=(--user "$(id -u):$(id -g)" -e USER="$(id -un)" -e HOME=/tmp)   # what is written in /app belongs to its owner
mount() { [[ -d $1 ]] && line+=(-v "$(realpath "$1"):$2"); return 0; }
mount "${DATA_DIR:-data}" /data
mount "${MODELS_DIR:-models}" /models
mkdir -p "${HF_HOME:-$HOME/.cache/huggingface}"
mount "${HF_HOME:-$HOME/.cache/huggingface}" /hf_cache
line+=(-e HF_HOME=/hf_cache)
[[ -f .env ]] && line+=(--env-file .env)
[[ -t 0 && -t 1 ]] && line+=(-it)
line+=("$image" sft_nb train "${forwarded[@]}")
if [[ -n $dry_run ]]; then printf '%q ' "${line[@]}"; echo; else exec "${line[@]}"; fi
