"""Train on a Ray cluster: each worker of Ray Train is one rank, started as srun starts one, without torchrun.

    python launchers/ray_train.py 16 train_fsdp2.py --config-name vit_base_patch16_224 data.path=/data/imagenet

The number is that of the ranks, one GPU each where the cluster has any; what follows is what a torchrun command would
say. Start it in this repository's folder, which all nodes have at one path, as they have the run's folder.

If a rank, its worker or its node dies, all start again, from the newest checkpoint, RESTARTS times (3) at most. Ctrl-C
or SIGTERM here stops the ranks by SIGTERM: they save, and the same command goes on from there. 2 is a mistake's code.
"""

import os
import signal
import socket
import subprocess
import sys
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer's workers would join a group
from ray.util.queue import Queue


def run_rank(job: dict) -> int:
    """One rank from its start to its end; the exit code of a run that is over, and of a mistake, comes back."""
    ray_says, meeting = get_context(), None
    place = {name: getattr(ray_says, f"get_{name}")() for name in ("local_rank", "local_world_size", "world_size")}
    if (rank := ray_says.get_world_rank()) == 0:
        job["starts"].put(None)
        with socket.socket() as free:
            free.bind(("", 0))
            meeting = ray.util.get_node_ip_address(), free.getsockname()[1], job["starts"].qsize()
    told: Any = broadcast_from_rank_zero(meeting)
    place["rank"], (place["master_addr"], place["master_port"], start) = rank, told
    resume = ["checkpoint.resume_from_checkpoint=true"] if start > 1 else []  # what is to start afresh does so once
    # Ray kills a worker: by setpriv its rank gets SIGTERM, and saves. In a session of its own, because Ray's own end
    # kills the rest of the driver's.
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, *job["arguments"], *resume]
    env = os.environ | {name.upper(): str(value) for name, value in place.items()}
    code = subprocess.run(command, cwd=job["folder"], env=env, start_new_session=True).returncode
    if code and not (code == 2 and start == 1):  # later, 2 may be the lock of ranks that are still saving
        raise RuntimeError(f"rank {rank} ended with exit code {code}")
    return code


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[1].isdecimal() or not os.path.isfile(sys.argv[2]):
        print("error: give ranks and a script: ray_train.py 16 train_ddp.py [KEY=VALUE ...]", file=sys.stderr)
        sys.exit(2)
    ray.init()
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # which Ray Train hears
    starts = Queue(actor_options={"num_cpus": 0})  # an entry for each start of the ranks, whom Ray does not tell
    job = {"starts": starts, "arguments": sys.argv[2:], "folder": os.getcwd()}
    scaling = ScalingConfig(num_workers=int(sys.argv[1]), use_gpu="GPU" in ray.cluster_resources())
    run = RunConfig(failure_config=FailureConfig(max_failures=int(os.environ.get("RESTARTS", "3"))))
    run.worker_runtime_env = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}}  # see run_rank
    trainer = DataParallelTrainer(run_rank, train_loop_config=job, scaling_config=scaling, run_config=run)
    sys.exit(trainer.fit().return_value)
