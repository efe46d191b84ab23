#!/bin/bash
# Two nodes with four devices each. srun starts one task for each device; the Trainer finds out from there.
#
#     sbatch examples/slurm_train.sh
#
# Keep --ntasks-per-node at the number of devices of a node, and leave devices and num_nodes of the Trainer at "auto".
# A job that SLURM puts back into its queue (--requeue) goes on from its last checkpoint.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
# SIGTERM two minutes before the time is over: each rank finishes its step, then the run is saved.
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log

set -euo pipefail
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# One rank that fails ends the job, not only its own task.
srun --kill-on-bad-exit=1 python examples/train_gpt.py --strategy zero3 --precision bf16-mixed "$@"
