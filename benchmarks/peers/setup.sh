#!/bin/sh
# Makes the environment of each peer that is named, from its pinned requirements; `make bench-peers` runs it.
# usage: benchmarks/peers/setup.sh PYTHON PEER...
set -eu
cd "$(dirname "$0")"
base=$1
shift
export PIP_DISABLE_PIP_VERSION_CHECK=1

for peer in "$@"; do
    env=.envs/$peer
    if cmp -s "$peer.txt" "$env/.ready"; then continue; fi
    rm -rf "$env"
    echo "making $peer's environment with $("$base" --version)"
    "$base" -m venv "$env"
    if "$env/bin/python" -m pip -qq install -r "$peer.txt"; then
        cp "$peer.txt" "$env/.ready"
    else
        rm -rf "$env"
        echo "error: $peer cannot be installed; if pip found no torch of the version in $peer.txt: PIP_EXTRA_INDEX_URL" \
            "or PIP_FIND_LINKS must name where PyTorch keeps its builds for the CPU" >&2
        exit 1
    fi
done

# Peers that use torch are measured with jemalloc, too, where there is one.
if ! ldconfig -p 2>/dev/null | grep -q libjemalloc && [ ! -d .envs/jemalloc ] && command -v apt-get >/dev/null; then
    mkdir -p .envs/jemalloc
    (cd .envs/jemalloc && apt-get -qq download libjemalloc2 2>/dev/null && dpkg -x libjemalloc2_*.deb .) ||
        echo "no jemalloc: torch is measured with the default allocator alone" >&2
fi
