#!/bin/bash
# Two nodes with four devices each. srun starts one task per device, and the Trainer reads its rank from SLURM.
#
#     sbatch examples/slurm_train.sh
#
# Keep --ntasks-per-node at the number of devices of a node, and leave devices and num_nodes of the Trainer at "auto".
# A job that SLURM requeues (--requeue) resumes from its last checkpoint.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
# SIGTERM two minutes before the time limit: each rank finishes its step, and the run is saved.
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log

set -euo pipefail
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# A failed rank ends the whole job.
srun --kill-on-bad-exit=1 python examples/train_gpt.py --strategy zero3 --precision bf16-mixed "$@"
