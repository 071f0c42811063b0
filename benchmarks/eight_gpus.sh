#!/usr/bin/env bash
# The headline table on 1, 2, 4 and 8 GPUs, on as many as there are. tools/estimate.py's numbers stand beside what was measured;
# for numbers of GPUs that are not there they stand alone.
#     bash benchmarks/eight_gpus.sh FOLDER
# B/16 with 512 images a GPU and G/14 with 16, three strategies, TransformerEngine in BF16 and FP8: images/s, share of the
# GEMM rate, scaling, memory, first step (scaling.json); on all GPUs what the collectives hide (profile_*.json), a save and a
# resume (save_*.json; of G/14 under FSDP2 alone). Each step's file stays, whatever ends early.
set -u
folder=$1
cd "$(dirname "$0")/.."
mkdir -p "$folder"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
trap 'tar czf "$folder.tar.gz" -C "$(dirname "$folder")" "$(basename "$folder")"' EXIT
timeout 1200 python tools/scaling.py --output "$folder/scaling.json" >"$folder/scaling.log" 2>&1
for size in base_patch16:512 gigantic_patch14:16; do
    model=${size%:*} images=${size#*:}
    run="--config-name vit_base_patch16_224 model=vit_${model}_224 data=synthetic num_epochs=null"
    run+=" lr_scheduler.num_warmup_epochs=null lr_scheduler.num_warmup_steps=10 global_batch_size=$((images * gpus))"
    te="model.act_layer=gelu_tanh model.transformer_engine=true compile=false"
    for script in train_ddp train_fsdp2 train_mfsdp; do
        timeout -k 10 120 torchrun --standalone --nproc-per-node "$gpus" tools/benchmark.py profile --script $script \
            --output "$folder/profile_${model}_$script.json" -- $run $te num_train_steps=30 >"$folder/profile_${model}_$script.log" 2>&1
    done
    [ $model = gigantic_patch14 ] && scripts=train_fsdp2 || scripts="train_ddp train_fsdp2 train_mfsdp"
    timeout -k 10 400 python tools/benchmark.py save --scripts $scripts --nproc "$gpus" --output "$folder/save_$model.json" -- \
        $run $te >"$folder/save_$model.log" 2>&1
done
