#!/usr/bin/env bash
# Environment of an Ascend NPU. Sourced by the launchers on every machine; does nothing where CANN is not found.
# Everything below can be overridden from outside: a variable that is set already keeps its value.

# Print CANN's set_env.sh: from its own variables, its install info, or the folder that its installer proposes.
_difftrain_cann() {
    local info root part
    info="${ASCEND_CANN_INSTALL_INFO:-/etc/Ascend/ascend_cann_install.info}"
    for root in "${ASCEND_TOOLKIT_HOME:+$ASCEND_TOOLKIT_HOME/..}" \
        "$(sed -n 's/^[A-Za-z]*Install_Path=//p' "$info" 2>/dev/null | head -n 1)" \
        /usr/local/Ascend "$HOME/Ascend"; do
        [ -n "$root" ] || continue
        for part in set_env.sh cann/set_env.sh ascend-toolkit/set_env.sh nnae/set_env.sh; do
            if [ -f "$root/$part" ]; then
                echo "$root/$part"
                return
            fi
        done
    done
}

_difftrain_env_npu() {
    local cann wrong route master flags=$-
    cann="$(_difftrain_cann)"
    [ -n "$cann" ] || return 0
    if ! wrong="$(bash -n "$cann" 2>&1)"; then
        echo "CANN's $cann cannot be read, NPUs will not be found: ${wrong##*$'\n'} (install CANN again, or name another as ASCEND_TOOLKIT_HOME)" >&2
        return 0
    fi
    set +eu # CANN's script appends to variables that may not be set
    trap 'echo "CANN'"'"'s $cann ended the launcher (install CANN again, or name another as ASCEND_TOOLKIT_HOME)" >&2' EXIT
    # shellcheck source=/dev/null
    source "$cann"
    trap - EXIT
    case "$flags" in *e*) set -e ;; esac
    case "$flags" in *u*) set -u ;; esac

    # Errors only, and into CANN's log folder: its info log costs more time than a small kernel.
    export ASCEND_GLOBAL_LOG_LEVEL="${ASCEND_GLOBAL_LOG_LEVEL:-3}"
    export ASCEND_SLOG_PRINT_TO_STDOUT="${ASCEND_SLOG_PRINT_TO_STDOUT:-0}"
    # No event log: it is written at every launch whatever the level.
    export ASCEND_GLOBAL_EVENT_ENABLE="${ASCEND_GLOBAL_EVENT_ENABLE:-0}"
    # Kernels are launched from a second thread; 2 moves the choice of the tiling there too, from torch_npu 2.4 on.
    export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-$(_difftrain_task_queue)}"
    # Adjacent non-contiguous copies become one operator.
    export COMBINED_ENABLE="${COMBINED_ENABLE:-1}"
    # No list of allowed servers: machines join by the master's address alone.
    export HCCL_WHITELIST_DISABLE="${HCCL_WHITELIST_DISABLE:-1}"
    # Seconds that ranks wait for one another to connect: first compilations differ by minutes between machines.
    export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
    # Seconds that a collective waits: one rank saves or compiles while the others are at the next step.
    export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-1800}"
    # MiB of each communication buffer: SDXL's gradient buckets fit without being cut.
    export HCCL_BUFFSIZE="${HCCL_BUFFSIZE:-200}"
    # The allocator grows segments in place: aspect buckets otherwise fragment the memory until it is full.
    # torch_npu takes this or PYTORCH_ALLOC_CONF, and ends where it finds both.
    if [ -z "${PYTORCH_ALLOC_CONF:-}" ]; then
        export PYTORCH_NPU_ALLOC_CONF="${PYTORCH_NPU_ALLOC_CONF:-expandable_segments:True}"
    fi
    # Memory that a communication stream has finished with is used again at once.
    export MULTI_STREAM_MEMORY_REUSE="${MULTI_STREAM_MEMORY_REUSE:-1}"
    # Machines with several networks: the address that routes to the master, which HCCL cannot guess. Where MASTER_IP is
    # not exported, the launchers find it once they know the master.
    if [ -z "${HCCL_IF_IP:-}" ] && [ -n "${MASTER_IP:-}" ] && command -v ip >/dev/null 2>&1; then
        master="$MASTER_IP"
        case "$master" in # a host name, as clusters give it
            *[!0-9.]*) master="$(getent ahostsv4 "$master" 2>/dev/null | sed -n '1s/[[:space:]].*//p')" || true ;;
        esac
        route="$(ip -o route get "${master:-none}" 2>/dev/null | sed -n 's/.* src \([0-9.]*\).*/\1/p')" || true
        case "$route" in "" | 127.*) ;; *) export HCCL_IF_IP="$route" ;; esac
    fi
}

_difftrain_task_queue() {
    "${difftrain_python:-python3}" - <<'PYTHON' 2>/dev/null || echo 1
from importlib.metadata import version

print(2 if tuple(map(int, version("torch_npu").split(".")[:2])) >= (2, 4) else 1)
PYTHON
}

_difftrain_env_npu
unset -f _difftrain_cann _difftrain_env_npu _difftrain_task_queue
