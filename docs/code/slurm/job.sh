#!/bin/bash
#SBATCH --job-name=gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append

export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export ROOMIER_JOB=slurm-$SLURM_JOB_ID
for _ in {0..3}; do
    srun --kill-on-bad-exit=1 python examples/train_gpt.py --strategy zero3 --precision bf16-mixed && exit
done
