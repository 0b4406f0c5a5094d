#!/bin/bash
# Trains on all nodes of a Slurm job, with one process per GPU:
#     sbatch examples/slurm.sh train.py --its options
#SBATCH --job-name=distca
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
set -euo pipefail

FIRST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Jobs that share a node need different ports.
PORT=$((20000 + SLURM_JOB_ID % 10000))
export FIRST PORT
# The network interface between nodes. By default, gloo takes the address to which the host's name resolves.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-eth0}

# Each node expands the variables in this command, so torchrun gets the rank of that node.
srun --kill-on-bad-exit=1 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --node_rank "$SLURM_NODEID" \
    --nproc_per_node "$SLURM_GPUS_ON_NODE" --master_addr "$FIRST" --master_port "$PORT" "$@"' torchrun "$@"
