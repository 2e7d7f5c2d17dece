#!/bin/sh
# Which GPUs does this node have? Spark runs this on each worker or executor, and takes from stdout
#   {"name": "gpu", "addresses": ["0", "1"]}
# It fails, with the reason on stderr, where there is no GPU to be had.
# Numbers are those of nvidia-smi, which sorts by PCI bus: CUDA agrees if CUDA_DEVICE_ORDER says so,
# as the *-gpu.conf files do.
set -eu

fail() {
    echo "discover_gpus.sh: $1" >&2
    exit 1
}

command -v nvidia-smi >/dev/null 2>&1 ||
    fail "there is no nvidia-smi on the PATH; install NVIDIA's driver, or run the container with it"
found=$(nvidia-smi --query-gpu=index --format=csv,noheader 2>&1) || fail "nvidia-smi failed: $found"
addresses=""
for index in $found; do
    case $index in
    *[!0-9]*) fail "nvidia-smi lists no GPUs: $found" ;;
    esac
    addresses="$addresses${addresses:+, }\"$index\""
done
[ -n "$addresses" ] || fail "nvidia-smi lists no GPUs"
echo "{\"name\": \"gpu\", \"addresses\": [$addresses]}"
