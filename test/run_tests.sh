#!/usr/bin/env bash
# Runs every test: sets up an environment of its own in the user's cache folder, then one tier after the other, and
# stops at the first that fails. Needs Python 3.11, pip, a C++ compiler and npm.
#   bash test/run_tests.sh                          everything
#   bash test/run_tests.sh --tier unit              one tier; may be given several times
#   bash test/run_tests.sh --tier unit -k captions  further words go to pytest
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
cd "$here/.."
# shellcheck source=test/find_python.sh
source "$here/find_python.sh"

TIERS="lint house unit contracts golden integration launchers simulated_npu"
budget_min() { # on two cores
    case "$1" in lint) echo 2 ;; house) echo 1 ;; unit) echo 3 ;; contracts) echo 4 ;; golden) echo 3 ;; integration) echo 12 ;; *) echo 8 ;; esac
}

chosen=""
words=()
while [ $# -gt 0 ]; do
    case "$1" in
        --tier)
            chosen="$chosen ${2:?"--tier: give one of $TIERS"}"
            shift 2
            ;;
        --tier=*)
            chosen="$chosen ${1#*=}"
            shift
            ;;
        -h | --help)
            sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            exit 0
            ;;
        *)
            words+=("$1")
            shift
            ;;
    esac
done
for tier in $chosen; do
    case " $TIERS " in *" $tier "*) ;; *)
        echo "--tier: no tier $tier, one of $TIERS" >&2
        exit 2
        ;;
    esac
done

# The environment: one for each set of requirements, kept between runs, built under a lock and marked when whole.
base="$(find_python)"
key="$(cat requirements.txt requirements-dev.txt <("$base" -VV) <(echo "$base") | cksum | cut -d ' ' -f 1)"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/difftrain"
venv="$cache/test-venv-$key"
mkdir -p "$cache"
if [ ! -e "$venv/ready" ]; then
    exec 9>"$cache/test-venv-$key.lock"
    if command -v flock >/dev/null 2>&1; then flock 9; fi
fi
if [ ! -e "$venv/ready" ]; then
    echo "== environment: $venv"
    rm -rf "$venv"
    log="$cache/test-venv-$key.log"
    if ! {
        "$base" -m venv "$venv" &&
            "$venv/bin/python" -m pip install --disable-pip-version-check -r requirements-dev.txt
    } >"$log" 2>&1 </dev/null; then
        cat "$log" >&2
        echo "the test environment could not be made; pip's output is above" >&2
        exit 2
    fi
    touch "$venv/ready"
fi
python="$venv/bin/python"

# What an outer launcher, a cluster or a user's shell set must not reach the tests.
for name in RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT PYTHONPATH PYTHONDONTWRITEBYTECODE \
    PYTHON batch_size max_train_epoch mixed_precision resolution model_name dataset_name device_id performance master_ip \
    ASCEND_DEVICE_ID ${!PET_@} ${!TORCHELASTIC_@}; do
    unset "$name"
done
export DIFFTRAIN_TESTS=$$ # what all tiers fork processes from stays as long as this one: test/support/warm.py
export HF_HUB_OFFLINE=1 PIP_DISABLE_PIP_VERSION_CHECK=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PATH="$venv/bin:$PATH"

run_tier() {
    case "$1" in
        lint)
            local types code=0
            "$python" -m mypy --cache-dir "$cache/mypy-$key" & # beside ruff; the cache serves every checkout
            types=$!
            { "$python" -m ruff check . && "$python" -m ruff format --check .; } || code=$?
            wait "$types" || code=$?
            return "$code"
            ;;
        *)
            # find's own -quit, no pipe: where a pipe's reader ends first, find ends by SIGPIPE, which pipefail calls a fault
            if [ -z "$(find "test/$1" -name 'test_*.py' -print -quit 2>/dev/null)" ]; then
                echo "test/$1 holds no tests" >&2
                return 1
            fi
            # five times the budget on a slow and busy machine is late; more is a hang, and ends with every traceback
            local code=0 limit=$(($(budget_min "$1") * 300)) bounded=() device=()
            if command -v timeout >/dev/null 2>&1; then bounded=(timeout --kill-after=30 "$limit"); fi
            # tests compute on one thread; integration also waits, an eighth of its time on two workers, for jobs and their time
            # limits: it has one more; test/conftest.py puts long files first
            local workers=2
            if [ "$1" = integration ]; then workers=3; fi
            local side_by_side=(-n "$workers" --dist loadfile --no-loadscope-reorder)
            case "$1" in simulated_npu) device=(test/simulated_npu/run --devices=4) ;; esac
            ${bounded[@]+"${bounded[@]}"} ${device[@]+"${device[@]}"} "$python" -X faulthandler -m pytest "test/$1" --durations=5 \
                "${side_by_side[@]}" ${words[@]+"${words[@]}"} || code=$?
            if [ $code -eq 124 ]; then echo "$1 did not end within $limit s" >&2; fi
            if [ $code -eq 5 ] && [ ${#words[@]} -gt 0 ]; then code=0; fi # no test of this tier matches -k
            return $code
            ;;
    esac
}
started=$SECONDS
report=""
for tier in ${chosen:-$TIERS}; do
    minutes="$(budget_min "$tier")"
    echo
    echo "== $tier (budget $minutes min)"
    begun=$SECONDS
    code=0
    run_tier "$tier" </dev/null || code=$?
    took=$((SECONDS - begun))
    over=""
    if [ $took -gt $((minutes * 60)) ]; then over=", over its budget"; fi
    if [ $code -ne 0 ]; then verdict=FAILED; else verdict=passed; fi
    report="$report$(printf '%-14s %s in %d s of %d%s' "$tier" "$verdict" $took $((minutes * 60)) "$over")"$'\n'
    if [ $code -ne 0 ]; then
        printf '\n== summary\n%s' "$report"
        exit 1
    fi
done
printf '\n== summary, %d s in all\n%s' $((SECONDS - started)) "$report"
