#!/usr/bin/env bash
# What only two GPUs can show, in parts of at most ten minutes each:
#     bash benchmarks/two_gpus.sh right|graphs|fast|large FOLDER
# Each part writes its files into FOLDER and packs them into FOLDER/<part>.tar.gz, whatever ended early.
set -u
part=$1 folder=$2
cd "$(dirname "$0")/.."
mkdir -p "$folder"
files=$folder/$part
mkdir -p "$files"
trap 'tar czf "$folder/$part.tar.gz" -C "$folder" "$part"' EXIT

# run_tests NAME SECONDS ARGUMENTS: a test file, its log, one line of its outcome
run_tests() {
    local name=$1 limit=$2
    shift 2
    timeout -k 10 "$limit" python -m pytest -o addopts="-ra --timeout $limit" "$@" >"$files/$name.log" 2>&1
    local code=$?
    echo "$name: code $code $(grep -E '^=+ .*(passed|failed|error)' "$files/$name.log" | tail -1)" | tee -a "$files/summary.txt"
}

# train NAME SECONDS SCRIPTS OVERRIDES: benchmark.py train on both GPUs
train() {
    local name=$1 limit=$2 scripts=$3
    shift 3
    timeout -k 10 "$limit" python tools/benchmark.py train --scripts $scripts --nproc 2 --warmup 20 --timeout "$limit" \
        --output "$files/$name.json" -- "$@" $short >"$files/$name.log" 2>&1
    echo "$name: code $?" | tee -a "$files/summary.txt"
    grep '^{' "$files/$name.log" | tee -a "$files/summary.txt"
}

short="data=synthetic num_epochs=null lr_scheduler.num_warmup_epochs=null lr_scheduler.num_warmup_steps=10 logger.frequency=10"
short+=" evaluation.every_n_steps=null evaluation.every_n_epochs=null"
short+=" checkpoint.save_every_n_steps=null checkpoint.save_every_n_epochs=null"
all="train_ddp train_fsdp2 train_mfsdp"
case $part in
right) # gradients, resumes over GPU counts, replicas, tensor parallelism over NCCL
    run_tests tensor_parallel 180 tests/test_tensor_parallel.py -m gpu
    run_tests gpu 400 tests/test_gpu.py -m multi_gpu
    ;;
graphs) # the same digits with and without, and FP8's grid
    run_tests cuda_graphs 420 tests/test_cuda_graphs.py -m multi_gpu
    ;;
fast) # against twice one GPU: the same lines with --nproc 1 are in benchmarks/levers_h200x1.log
    for graphs in true false; do
        train "l16_128_fp8_$graphs" 130 "$all" --config-name vit_te_large_patch16_224 fp8_config.enabled=true \
            global_batch_size=256 num_train_steps=60 cuda_graphs=$graphs
        train "l16_128_bf16_$graphs" 130 "$all" --config-name vit_te_large_patch16_224 \
            global_batch_size=256 num_train_steps=60 cuda_graphs=$graphs
    done
    ;;
large) # 10 billion parameters: 30 steps
    train 10b 400 train_fsdp2 --config-name vit_10b_patch14_224 global_batch_size=64 num_train_steps=30 logger.frequency=3
    ;;
*)
    echo "error: part=$part: give right, graphs, fast or large" >&2
    exit 2
    ;;
esac
