#!/bin/bash
#SBATCH --job-name=ingot-small-train
#SBATCH --account=acct
#SBATCH --partition=gpu
#SBATCH --time=1-00:00:00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=512G
#SBATCH --signal=B:USR1@600
#SBATCH --no-requeue
#SBATCH --output=/scratch/team/runs/small/logs/slurm-train-%j.log
#SBATCH --open-mode=append
#SBATCH --export=ALL
#SBATCH --chdir=/scratch/team
#SBATCH --constraint=h100
# Of several requests of this start, as of one without an answer, the last one works.
current=$(cat runs/small/jobs/train-1/slurm.current 2>/dev/null)
if [ "${current:-$1}" != "$1" ]; then echo "ingot: $1 was given up"; exit 0; fi
export NCCL_SOCKET_IFNAME=eth0
export PET_MASTER_PORT=29500
export PET_NNODES=2
export PET_NPROC_PER_NODE=8
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_MASTER_ADDR=$(scontrol -o show node "$head" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
# Shortly before the time limit the ranks are told so by a note: a signal of srun would reach all their helpers too.
tell() {
  note=runs/small/jobs/train-1/signal-$(date +%s%N)
  echo '{"number": 10, "ranks": null, "by": "slurm"}' > "$note.partial" && mv "$note.partial" "$note.json"
}
trap tell USR1
srun --export=ALL --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 '--container-image=registry/team#ingot:1' --container-mounts=/scratch/team:/scratch/team,/data:/data --container-workdir=/scratch/team bash -c 'PET_NODE_RANK=$SLURM_NODEID exec /opt/py/bin/python -P -m ingot.launch.node --rendezvous runs/small/jobs/train-1 --rendezvous-timeout-s 1620 --run-folder runs/small --environment '"'"'runs/small/jobs/train-1/secrets-{node}.json'"'"' -- train '"'"'my recipe.yaml'"'"' train.steps=10' &
srun=$!
wait $srun; code=$?
while kill -0 $srun 2>/dev/null; do wait $srun; code=$?; done
exit $code
