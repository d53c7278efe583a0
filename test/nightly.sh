#!/usr/bin/env bash
# Long drills, each bounded in time: random kills and restarts, failures of every kind on every engine, ten million records, a model compiled by inductor, all of
# kohya's public lines, hostile files and configurations, thousands of steps in which nothing may grow, and planted faults
# that the tests must notice; and tests marked nightly. Two to three hours on two cores.
# Uses the environment of test/run_tests.sh, which must have run once.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" test/drills/random_kills.py --minutes="${KILL_MINUTES:-10}"
"$python" test/drills/random_kills.py --minutes="${KILL_MINUTES:-10}" --door=train
"$python" test/drills/failures.py --rounds="${FAILURE_ROUNDS:-50}" --minutes="${FAILURE_MINUTES:-30}" ${FAILURE_STATE:+--state="$FAILURE_STATE"}
PYTHONPATH=library "$python" benchmarks/scale.py
"$python" benchmarks/cache_chaos.py --rounds=200
"$python" benchmarks/cache_scale.py
"$python" test/drills/compiled.py --minutes="${COMPILE_MINUTES:-20}"
tests=(env DIFFTRAIN_NIGHTLY=1 OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1)
"${tests[@]}" "$python" -m pytest -q test/unit test/contracts test/integration test/launchers -m nightly
"${tests[@]}" test/simulated_npu/run --devices=4 "$python" -m pytest -q test/simulated_npu -m nightly
"$python" test/drills/hostile.py
"$python" test/drills/endurance.py --steps="${ENDURANCE_STEPS:-5000}"
"$python" test/drills/planted_faults.py
