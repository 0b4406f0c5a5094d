#!/usr/bin/env bash
# Runs all measurements on one node of eight GPUs, in an hour. README.md in this folder describes the results.
#     benchmarks/eight_gpus/run.sh              benchmarks/eight_gpus/run.sh --dry-run
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/eight_gpus.py" "$@"
