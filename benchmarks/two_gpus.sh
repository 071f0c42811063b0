#!/usr/bin/env bash
# What only two GPUs can show, in parts of at most ten minutes each:
#     bash benchmarks/two_gpus.sh alone|right|graphs|fast|large FOLDER
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

case $part in
alone) # two lines of one GPU each: CIFAR-10 in one command (CIFAR=folder, OPTIONS=overrides); the curve over depth, strategies
    : "${CIFAR:?a folder with CIFAR-10, train/ and val/}"
    half=$(($(nproc) / 2)) # of the cores for each: loaders of two runs on all of them keep both runs from their cores
    (
        taskset -cp 0-$((half - 1)) $BASHPID >/dev/null
        export CUDA_VISIBLE_DEVICES=0
        began=$SECONDS
        timeout -k 15 450 python train_ddp.py --config-name cifar10_vit_sizes data.path="$CIFAR" ${OPTIONS:-} \
            output_dir=/tmp/cifar_run >"$files/cifar.log" 2>&1
        echo "cifar: code $? after $((SECONDS - began)) s, $(grep -o 'val/top1 [0-9.]*' "$files/cifar.log" | tail -1)" |
            tee -a "$files/summary.txt"
        cp /tmp/cifar_run/metrics.jsonl /tmp/cifar_run/status.json "$files"
    ) &
    (
        taskset -cp "$half"-$((2 * half - 1)) $BASHPID >/dev/null
        export CUDA_VISIBLE_DEVICES=1
        timeout -k 10 300 python tools/benchmark.py compare --sizes large_patch16:128:{6,12,24} --steps 10 \
            --variants "^(timm, compiled|ours, TE, BF16|ours, TE, FP8 delayed)" --output "$files/peers_l16_depths.json" \
            >"$files/depths.log" 2>&1
        echo "depths: code $?, $(grep -c '^{' "$files/depths.log") rows" | tee -a "$files/summary.txt"
        # What twice one GPU would be, for `fast` on the same machine.
        sizes="large_patch16:128 large_patch16:256 huge_patch14:64 base_patch16:512"
        strategies one_te 200 1 --sizes $sizes --variants "BF16|delayed" --scripts train_ddp
        strategies one_compiled 60 1 --sizes large_patch16:128 --variants compiled --scripts train_ddp
    ) &
    wait
    ;;
right) # gradients, replicas, resumes over GPU counts, tensor parallelism over NCCL
    run_tests gpu_counts 200 tests/test_gpu_counts.py -m multi_gpu
    run_tests tensor_parallel 100 tests/test_tensor_parallel.py -m gpu
    run_tests gpu 280 tests/test_gpu.py -m multi_gpu
    run_tests later_options 150 tests/test_later_options.py -m multi_gpu
    ;;
graphs) # the same digits with and without, and FP8's grid
    run_tests cuda_graphs 420 tests/test_cuda_graphs.py -m multi_gpu
    ;;
fast) # two GPUs; what one makes is in `alone`
    strategies two_compiled 90 2 --sizes large_patch16:128 --variants compiled
    sizes="large_patch16:128 large_patch16:256 huge_patch14:64 base_patch16:512"
    strategies two_te 360 2 --sizes $sizes --variants "BF16|delayed|ZeRO"
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
    until_line "$files/straight.log" "step 30/" 330 $run output_dir=/tmp/10b_straight
    until_line "$files/resumed.log" "step 30/" 200 $run output_dir=/tmp/10b_resumed
    for which in straight resumed; do cp /tmp/10b_$which/metrics.jsonl "$files/$which.jsonl"; done
    rm -rf $place/10b
    ;;
*)
    echo "error: part=$part: give alone, right, graphs, fast or large" >&2
    exit 2
    ;;
esac
