#!/usr/bin/env bash
# What every launcher does: find a Python that will do, see to the packages, source the device's environment, and hand
# over to difftrain/launch, which knows the flags. Usage: launch_common.sh RECIPE LAYOUT [flags]
# Each stage replaces the one before it, so that the process a user stops is the one that runs the training.
set -euo pipefail
# names that no script of a vendor's, which env_npu.sh sources into this shell, will use for its own
difftrain_test="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"

# shellcheck source=test/find_python.sh
source "$difftrain_test/find_python.sh"

difftrain_python="$(find_python)"
difftrain_python="$("$difftrain_python" "$difftrain_test/../library/difftrain/launch/environment.py")"

# shellcheck source=/dev/null
source "$difftrain_test/env_npu.sh"
# shellcheck source=/dev/null
source "$difftrain_test/env_cuda.sh"

exec "$difftrain_python" "$difftrain_test/../library/difftrain/launch/main.py" "$@"
