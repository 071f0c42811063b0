#!/usr/bin/env bash
# The headline table on 1, 2, 4 and 8 GPUs, on as many as there are; tools/estimate.py's numbers stand beside, for the rest alone.
#     bash benchmarks/eight_gpus.sh FOLDER
# B/16 with 512 images a GPU and G/14 with 16, three strategies, TransformerEngine in BF16 and FP8: images/s, scaling, memory;
# then what the collectives hide, a save and a start on all GPUs. Sums to about half an hour on eight; each step's file stays.
set -u
folder=$1
cd "$(dirname "$0")/.."
mkdir -p "$folder"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
trap 'tar czf "$folder.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")"' EXIT
timeout 1500 python tools/scaling.py --output "$folder/scaling.json" -- cuda_graphs=${GRAPHS:-false}
l16="--config-name vit_te_large_patch16_224 data=synthetic num_epochs=null num_train_steps=30"
for script in train_ddp train_fsdp2 train_mfsdp; do
    timeout 120 torchrun --standalone --nproc-per-node "$gpus" tools/benchmark.py profile --script $script \
        --output "$folder/profile_$script.json" -- $l16 global_batch_size=$((128 * gpus))
done
timeout 300 python tools/benchmark.py save --nproc "$gpus" --output "$folder/save.json" -- \
    --config-name vit_base_patch16_224 data=synthetic global_batch_size=$((64 * gpus))
timeout 200 python tools/benchmark.py start --nproc "$gpus" --output "$folder/start.json" -- \
    --config-name vit_base_patch16_224 data=synthetic compile=true global_batch_size=$((64 * gpus))
