#!/bin/bash
# Train on two nodes with four devices each. srun starts one task per device. The Trainer reads its rank from SLURM.
#
#     sbatch examples/slurm_train.sh
#
# Set --ntasks-per-node to the number of devices per node, and leave the Trainer's devices and num_nodes at "auto".
# SLURM sends SIGTERM two minutes before the time limit (--signal). Each rank then finishes its step, the run is saved,
# and rank 0 returns the job to the queue (`scontrol requeue`). The restarted job resumes from this checkpoint, and the
# job ends when training is complete. `scancel` ends the job. To end it at the time limit, use --no-requeue.
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
# Without this option, a restart overwrites the log of the first start.
#SBATCH --open-mode=append

set -euo pipefail
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
# If a rank fails, srun ends all ranks. They start again up to three times, and resume from the last checkpoint.
export ROOMIER_JOB=slurm-$SLURM_JOB_ID
for _ in {0..3}; do
    srun --kill-on-bad-exit=1 python examples/train_gpt.py --strategy zero3 --precision bf16-mixed "$@" && exit
done
