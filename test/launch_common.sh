#!/usr/bin/env bash
# What every launcher does: find a Python that will do, see to the packages, source the device's environment, and hand
# over to difftrain/launch, which knows the flags. Usage: launch_common.sh RECIPE LAYOUT [flags]
# Each stage replaces the one before it, so that the process a user stops is the one that runs the training.
set -euo pipefail
# names that no script of a vendor's, which env_npu.sh sources into this shell, will use for its own
difftrain_test="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

# shellcheck source=test/find_python.sh
source "$difftrain_test/find_python.sh"

# The address that the device environments route to, which difftrain/launch reads properly: from the flag, the shell
# variable of its name, or what the cluster has set. An exported MASTER_IP is the user's.
master_of() {
    local previous="" word address="${master_ip:-${MASTER_ADDR:-}}"
    for word in "$@"; do
        case "$previous" in --master_ip) address="$word" ;; esac
        case "$word" in --master_ip=*) address="${word#*=}" ;; esac
        previous="$word"
    done
    echo "$address"
}

difftrain_python="$(find_python)"
difftrain_python="$("$difftrain_python" "$difftrain_test/../library/difftrain/launch/environment.py")"

MASTER_IP="${MASTER_IP:-$(master_of "$@")}"
export MASTER_IP
# shellcheck source=/dev/null
source "$difftrain_test/env_npu.sh"
# shellcheck source=/dev/null
source "$difftrain_test/env_cuda.sh"

exec "$difftrain_python" "$difftrain_test/../library/difftrain/launch/main.py" "$@"
