#!/usr/bin/env bash
# Environment of a CUDA device. Sourced by the launchers on every machine; does nothing where no driver is found.
# Everything below can be overridden from outside. NCCL_P2P_DISABLE, NCCL_IB_DISABLE and NCCL_SOCKET_IFNAME are left
# as they are found: which links a machine has is the machine's business.

_difftrain_env_cuda() {
    [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null 2>&1 || return 0

    # Say what went wrong in a collective, and nothing else.
    export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"
    # The allocator grows segments in place: aspect buckets otherwise fragment the memory until it is full.
    export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
}

_difftrain_env_cuda
unset -f _difftrain_env_cuda
