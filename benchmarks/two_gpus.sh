#!/usr/bin/env bash
# What only two GPUs can show, in parts of at most ten minutes each:
#     bash benchmarks/two_gpus.sh alone|right|fast|overlap|ctas|large FOLDER
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

# strategies NAME SECONDS GPUS ARGUMENTS: benchmark.py strategies on as many GPUs, rows as they come
strategies() {
    local name=$1 limit=$2 gpus=$3
    shift 3
    timeout -k 10 "$limit" torchrun --standalone --nproc-per-node "$gpus" tools/benchmark.py strategies --steps 10 \
        --output "$files/$name.json" "$@" >"$files/$name.log" 2>&1
    echo "$name: code $?, $(grep -c '^{' "$files/$name.log") rows" | tee -a "$files/summary.txt"
}

# profile GPUS SCRIPT NAME OVERRIDES: what a step of L/16 with 128 images a GPU waits for
profile() {
    local gpus=$1 script=$2 name=$2_$3
    shift 3
    timeout -k 10 60 torchrun --standalone --nproc-per-node "$gpus" tools/benchmark.py profile --script $script \
        --output "$files/profile_$name.json" -- --config-name vit_te_large_patch16_224 data=synthetic num_epochs=null \
        num_train_steps=40 global_batch_size=$((128 * gpus)) lr_scheduler.num_warmup_steps=10 "$@" >"$files/profile_$name.log" 2>&1
    echo "profile of $name: code $?" | tee -a "$files/summary.txt"
}

# until_line LOG PATTERN SECONDS COMMAND: start it, and kill it when its log has the line; at its end it would save again.
# The command's last argument is the run's output_dir, by which its processes are known.
until_line() {
    local log=$1 pattern=$2 limit=$3 began=$SECONDS output=${*: -1}
    shift 3
    setsid "$@" >"$log" 2>&1 &
    local process=$!
    until grep -qE "$pattern" "$log" || ((SECONDS - began > limit)) || ! kill -0 $process 2>/dev/null; do sleep 0.2; done
    kill -9 -- -$process 2>/dev/null
    for of in /proc/[0-9]*; do # ranks, which have sessions of their own
        grep -qsF -- "$output" "$of/cmdline" && kill -9 "${of#/proc/}" 2>/dev/null
    done
    wait $process 2>/dev/null
    grep -qE "$pattern" "$log"
    echo "$(basename "$log"): code $? after $((SECONDS - began)) s" | tee -a "$files/summary.txt"
}

sizes="large_patch16:128 large_patch16:256 huge_patch14:64 base_patch16:512"

case $part in
alone) # what one GPU makes, for `fast` on the same machine; CUDA_VISIBLE_DEVICES and taskset choose it and its cores
    strategies one_te 200 1 --sizes $sizes --variants "BF16|delayed" --scripts train_ddp
    strategies one_compiled 60 1 --sizes large_patch16:128 --variants compiled --scripts train_ddp
    ;;
right) # all at the same time, since most of it is the host's: gradients, replicas, resumes over GPU counts, graphs, FP8
    for name in gpu_counts gpu fp8 cuda_graphs later_options; do
        run_tests $name 540 -v tests/test_$name.py -m multi_gpu &
    done
    run_tests tensor_parallel 540 -v tests/test_tensor_parallel.py -m gpu &
    wait
    ;;
fast) # two GPUs; what one makes is in `alone`
    for script in train_ddp train_fsdp2 train_mfsdp; do profile 2 $script fp8 fp8_config.enabled=true; done
    strategies two_te 300 2 --sizes $sizes --variants "BF16|delayed"
    strategies two_zero 60 2 --sizes large_patch16:128 large_patch16:256 --variants ZeRO
    strategies two_compiled 80 2 --sizes large_patch16:128 --variants compiled
    ;;
overlap) # what takes two GPUs longer than one: other cards, kernels beside NCCL's; Muon, whose work the ranks share
    timeout 300 python tools/scaling.py --sizes large_patch16:128 huge_patch14:64 --variants "TE, BF16" --gpus 1 2 \
        --scripts train_ddp train_fsdp2 --output "$files/scaling.json" >"$files/scaling.log" 2>&1
    echo "scaling: code $?, $(grep -c '^{' "$files/scaling.log") rows" | tee -a "$files/summary.txt"
    for card in 0 1; do # at the same time, as the two of a pair are
        CUDA_VISIBLE_DEVICES=$card profile 1 train_ddp card_$card &
    done
    wait
    for script in train_ddp train_fsdp2; do
        profile 2 $script adamw
        profile 2 $script muon optimizer.name=muon optimizer.momentum=0.95
    done
    ;;
ctas) # multiprocessors that NCCL may have, without and with as many that TransformerEngine's products leave free
    for most in 4 8 16; do
        export NCCL_MAX_CTAS=$most
        for margin in 0 $most; do
            NVTE_EXT_MARGIN_SM=$margin strategies "two_ctas_${most}_margin_$margin" 90 2 --scripts train_ddp train_fsdp2 \
                --sizes large_patch16:128 huge_patch14:64 --variants "TE, BF16"
        done
        [ $most = 8 ] && profile 2 train_ddp ctas_$most
    done
    ;;
large) # 10 billion parameters: 30 steps with a save in step 20, then step 20 to 30 again in a fresh process
    run="torchrun --standalone --nproc-per-node 2 train_fsdp2.py --config-name vit_10b_patch14_224 global_batch_size=128"
    run+=" num_epochs=null num_train_steps=40 lr_scheduler.num_warmup_epochs=null lr_scheduler.num_warmup_steps=10"
    run+=" evaluation.every_n_steps=null evaluation.every_n_epochs=null data.num_workers=12 logger.frequency=1"
    run+=" checkpoint.save_every_n_epochs=null checkpoint.save_every_n_steps=20 checkpoint.save_final_model=false"
    data="data=synthetic"
    [ -n "${DATA:-}" ] && data="data.path=$DATA model.num_classes=10"
    place=/tmp
    [ "$(df --output=avail -BG /dev/shm | tr -dc 0-9)" -gt 90 ] && place=/dev/shm # 75 GiB, faster than a disk
    df -h /dev/shm /tmp >"$files/places.txt"
    run+=" $data checkpoint.ckpt_dir=$place/10b"
    until_line "$files/straight.log" "step 30/" 400 $run output_dir=/tmp/10b_straight
    until_line "$files/resumed.log" "step 30/" 250 $run output_dir=/tmp/10b_resumed
    for which in straight resumed; do cp /tmp/10b_$which/metrics.jsonl "$files/$which.jsonl"; done
    rm -rf $place/10b
    ;;
*)
    echo "error: part=$part: give alone, right, fast, overlap, ctas or large" >&2
    exit 2
    ;;
esac
