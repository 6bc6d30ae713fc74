#!/usr/bin/env bash
# Starts one process on each host by ssh. The current folder must exist on all hosts under the same path:
#
#   scripts/launch/ssh.sh node-a,node-b,user@node-c .venv/bin/python -m jppo.train --config=FILE ...
#
# The first host coordinates. MASTER_ADDR is its address for the others (default: its name in the list),
# MASTER_PORT a free port there (29500), SSH a command to use instead of ssh. The exit code is the first non-zero one
# of the hosts.
set -euo pipefail

if [[ $# -lt 2 ]]; then
    echo "error: scripts/launch/ssh.sh HOST,HOST,... COMMAND...; COMMAND on each HOST" >&2
    exit 2
fi
IFS=, read -r -a hosts <<<"$1"
shift
address=${MASTER_ADDR:-${hosts[0]#*@}}
port=${MASTER_PORT:-29500}

pids=()
for rank in "${!hosts[@]}"; do
    printf -v line '%q ' cd "$PWD"
    printf -v line '%s&& exec env %q %q %q %q ' "$line" \
        "NNODES=${#hosts[@]}" "NODE_RANK=$rank" "MASTER_ADDR=$address" "MASTER_PORT=$port"
    printf -v command '%q ' "$@"
    # -tt allocates a terminal, so the process ends with the connection.
    ${SSH:-ssh -tt -o BatchMode=yes} "${hosts[$rank]}" "$line$command" </dev/null &
    pids+=($!)
done
trap 'kill -TERM "${pids[@]}" 2>/dev/null || true' TERM INT
status=0
for pid in "${pids[@]}"; do
    code=0
    wait "$pid" || code=$?
    while kill -0 "$pid" 2>/dev/null; do
        code=0
        wait "$pid" || code=$?
    done
    if ((status == 0)); then status=$code; fi
done
exit "$status"
