#!/bin/bash
# Train under Slurm, on one node or many, over time limits and preemptions. Submit it from this folder, on a file system
# that all nodes share; what follows the script is what a torchrun command would say:
#
#   sbatch slurm.sh train_fsdp2.py --config-name vit_base_patch16_224 data.path=/data/imagenet
#   sbatch --nodes=4 --job-name=large slurm.sh train_ddp.py --config-name vit_base_patch16_224 data.path=/data/imagenet
#   CONTAINER=vit.sqsh sbatch slurm.sh ...    # an enroot image or a registry's name, by pyxis; vit.sif: by apptainer
#
# Before the time limit Slurm signals this script, and this script the ranks; they save and stop, and the job goes back
# into the queue. Its next start goes on from there, in the same wandb run. So does the same sbatch command, given again.
#
#SBATCH --job-name=vit            # the run's folder is runs/<job name>, unless output_dir= is given
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1       # one torchrun a node; it starts one process a GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-gpu=8          # a rank, and its loader's workers (data.num_workers)
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@300       # to this script alone (B), 300 s before the limit: time for a step and a save
#SBATCH --requeue                 # Slurm itself may start the job again, too: after a node's failure
#SBATCH --open-mode=append        # one log over all starts
#SBATCH --output=%x-%j.log

set -uo pipefail                  # not -e: how the run ended is looked at below
cd "$SLURM_SUBMIT_DIR" || exit    # Slurm runs a copy of this script, from a folder of its own
if [[ ${1:-} != train_*.py ]]; then
  echo "error: give a script: sbatch slurm.sh train_ddp.py [--config-name NAME] [KEY=VALUE ...]" >&2
  exit 2
fi

# The run's folder, unless the arguments say otherwise: what comes later on a command line counts.
set -- "$1" "output_dir='runs/$SLURM_JOB_NAME'" "${@:2}"
# A job that was told to start afresh does so once, not after each requeue.
[[ ${SLURM_RESTART_COUNT:-0} == 0 ]] || set -- "$@" checkpoint.resume_from_checkpoint=true

# Where the processes run: in a virtual environment, or in a container that sees this folder (CONTAINER_MOUNTS: pyxis'
# further mounts, /data:/data; APPTAINER_BIND: apptainer's).
srun=(srun --kill-on-bad-exit=0)  # a signalled torchrun ends with 1, while another node may still be saving
inside=()
case ${CONTAINER:-} in
  "") source "${VENV:-.venv}/bin/activate" || exit ;;
  *.sif) inside=(apptainer exec --nv "$CONTAINER") ;;
  *) srun+=(--container-image="$CONTAINER" --container-workdir="$PWD"
            --container-mounts="$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}") ;;
esac

# The run's folder holds status.json, which says how the run ended: torchrun's exit code does not tell. Which folder that
# is, the script itself says: it reads its arguments as the run will. One that it cannot read is refused here, once.
trap 'scontrol requeue "$SLURM_JOB_ID"; exit' USR1  # before the run has started there is nothing to save
output_dir=$("${srun[@]}" --nodes=1 --ntasks=1 ${inside[@]+"${inside[@]}"} \
             python "$@" --cfg job --package output_dir --resolve) || exit
output_dir=${output_dir/#\~/$HOME}

# One torchrun a node. They meet at the first node, at a port that follows from the job; an id of its own for each start
# keeps a late process of the start before out.
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
torchrun=(torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${NPROC_PER_NODE:-gpu}"
          --rdzv-backend c10d --rdzv-endpoint "$first_node:$((20000 + SLURM_JOB_ID % 10000))"
          --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}")
# Without this USR1 kills torchrun, and not its ranks. Newer versions read the first name, older ones the second.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export TORCHELASTIC_SIGNALS_TO_HANDLE=$PET_SIGNALS_TO_HANDLE
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240  # seconds that a signalled torchrun gives its ranks to save; 30 by default

# In the background, because bash runs a trap only between commands, and in a `wait`, which the trap ends early.
signalled=
trap 'signalled=yes; kill -USR1 "$step"' USR1
"${srun[@]}" ${inside[@]+"${inside[@]}"} "${torchrun[@]}" "$@" &
step=$!
wait "$step"
code=$?
while kill -0 "$step" 2>/dev/null; do
  wait "$step"
  code=$?
done

# Back into the queue: a run that was stopped; also one that was signalled before it could say so. Not a run that failed,
# or whose status.json is an earlier start's.
state=$(sed -n 's/.*"state": "\([a-z]*\)".*/\1/p' "$output_dir/status.json" 2>/dev/null)
echo "slurm.sh: ${output_dir}: ${state:-no status.json}, exit code $code, start ${SLURM_RESTART_COUNT:-0}"
if [[ $state == preempted && $code == 0 || $signalled && $state != finished && $state != failed ]]; then
  scontrol requeue "$SLURM_JOB_ID"
elif [[ $signalled && $state == finished ]]; then
  exit 0                          # the signal came as the run ended; torchrun's code is the signal's
else
  exit "$code"
fi
