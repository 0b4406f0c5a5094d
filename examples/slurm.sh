#!/bin/bash
# Trains on the nodes of a Slurm job, with one process for each of their GPUs:
#     sbatch examples/slurm.sh train.py --its options
#SBATCH --job-name=distca
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

# Two jobs that share a node need two ports.
FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 10000))
export FIRST PORT
# The interface over which nodes reach each other; gloo otherwise takes that of the host's name.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eth0}

# Each node evaluates this line, so that it starts torchrun with its own number.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$SLURM_GPUS_ON_NODE" --master_addr "$FIRST" --master_port "$PORT" "$@"' torchrun "$@"
