#!/bin/bash
# A batch job for one node or many, which saves before its time is up and goes on in a new one.
#
# Submit it where the recipe is, with the environment active that has forgekit in it:
#   sbatch train.sh pretrain.py runs/a --config pretrain_8_gpus.toml
#   sbatch --nodes=8 train.sh pretrain.py runs/a --config pretrain_64_gpus.toml
# One task per GPU instead of torchrun:
#   sbatch --ntasks-per-node=8 --cpus-per-task=8 train.sh pretrain.py runs/a model.dim=1024
#
#SBATCH --job-name=forgekit
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue

if (($# < 2)); then
    echo "usage: sbatch [option...] train.sh RECIPE.py RUN_DIRECTORY [key=value...]" >&2
    exit 2
fi
recipe=$1
out=$2
shift 2

restarts=${SLURM_RESTART_COUNT:-0}
max_restarts=${MAX_RESTARTS:-100}
if ((restarts > max_restarts)); then
    echo "train.sh: $restarts restarts, and MAX_RESTARTS is $max_restarts: given up." >&2
    exit 1
fi

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1} # srun 22.05 and later read only this one

if ((SLURM_NTASKS_PER_NODE > 1)); then
    launch=(srun --kill-on-bad-exit=1 python)
else
    # torchrun returns 1 after a clean stop too. So the first node to be done must not make srun
    # kill the others, which may still be saving; they get this many seconds.
    launch=(
        srun --kill-on-bad-exit=0 --wait=300
        torchrun
        --nnodes="$SLURM_JOB_NUM_NODES"
        --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}"
        --rdzv-backend=c10d
        --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"
        --rdzv-id="$SLURM_JOB_ID"
        --max-restarts=0
        --signals-to-handle="SIGTERM,SIGINT,SIGUSR1" # SIGUSR1 kills torchrun otherwise
    )
    # Not --shutdown-timeout: torch 2.11 does not know it, and waits for 30 s.
    export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300
fi

read_status() {
    ls "$out" >/dev/null 2>&1 # makes NFS look again
    cat "$out/status.json" 2>/dev/null
}

before=$(read_status)
"${launch[@]}" "$recipe" out="$out" "$@" &
step=$!
was_warned=false
# Once: at a second signal torchrun leaves its workers, and a save with them.
trap '$was_warned || kill -USR1 "$step"; was_warned=true' USR1
trap : TERM # scancel sends it to the tasks as well; stay until they have saved
# A trap runs, and ends `wait`, only because the step is in the background; then wait again.
while
    wait "$step"
    code=$?
    ((code > 128)) && kill -0 "$step" 2>/dev/null
do :; done

# The run itself says how it ended; an exit code of torchrun does not.
status=nothing
after=$(read_status)
if [[ $after != "$before" ]]; then
    status=$(sed -n 's/^  "status": "\([a-z]*\)".*/\1/p' <<<"$after")
fi
echo "train.sh: the step returned $code, $out/status.json says ${status:-nothing}" >&2

if [[ $status == finished ]]; then
    exit 0
elif [[ $status == stopped ]] && $was_warned; then
    if ((restarts >= max_restarts)); then
        echo "train.sh: not requeued, since MAX_RESTARTS is $max_restarts." >&2
    elif scontrol requeue "$SLURM_JOB_ID"; then
        exit 0
    fi
fi
exit $((code > 0 ? code : 1))
