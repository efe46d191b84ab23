#!/bin/bash
# Train on two nodes with four devices each. srun starts one task per device. The Trainer reads its rank from SLURM.
#
#     sbatch examples/slurm_train.sh
#
# Set --ntasks-per-node to the number of devices per node, and leave the Trainer's devices and num_nodes at "auto".
# If SLURM requeues the job (--requeue), it resumes from its last checkpoint.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
# SLURM sends SIGTERM two minutes before the time limit. Each rank then finishes its step, and the run is saved.
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log

set -euo pipefail
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# If a rank fails, srun ends the whole job.
srun --kill-on-bad-exit=1 python examples/train_gpt.py --strategy zero3 --precision bf16-mixed "$@"
