#!/usr/bin/env bash
# Several processes of one run on this machine, each as if it were a host:
#
#   scripts/launch/local.sh 2 python -m jppo.train --config=configs/quickstart.py ...
#
# For tests: a machine needs only one process. PORT is the coordinator's port, by default a free one.
# The exit code is the first non-zero one of the processes.
set -euo pipefail

if [[ $# -lt 2 || ! $1 =~ ^[1-9][0-9]*$ ]]; then
    echo "error: scripts/launch/local.sh COUNT COMMAND...; COUNT processes of COMMAND" >&2
    exit 2
fi
count=$1
shift
free='import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
export NNODES=$count MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT:-$(python3 -c "$free")}

pids=()
for ((rank = 0; rank < count; rank++)); do
    NODE_RANK=$rank "$@" &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
status=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do # a signal woke us, not the end of the process
        code=0
        wait "$pid" || code=$?
    done
    if ((status == 0)); then status=$code; fi
done
exit "$status"
