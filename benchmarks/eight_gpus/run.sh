#!/usr/bin/env bash
# Everything that one node of eight GPUs is rented for, in an hour; README.md beside this file says what comes out.
#     benchmarks/eight_gpus/run.sh              benchmarks/eight_gpus/run.sh --dry-run
set -euo pipefail
exec "${PYTHON:-python}" "$(dirname "${BASH_SOURCE[0]}")/eight_gpus.py" "$@"
