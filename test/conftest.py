"""What holds for all tests: none asks a hub; those that want one have it on this machine (support/hub_stub.py)."""

import gc
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
gc.disable()  # until all test files and what they test are imported, which takes a sixth less so
# Handed out first, the longest before others: a long file at the end would keep the other workers waiting for it.
LONGEST = (
    "unit/evaluation/test_features", "contracts/test_sd3_speedups_flops", "integration/test_engine_families", "integration/test_communication",
    "integration/test_docs_adding",
    "integration/test_third_patch", "integration/test_evaluation_sets", "integration/test_run_dirs", "integration/test_cache_runs",
    "integration/test_train_door", "integration/test_sd3_speedups_engines", "integration/test_configs",
    "integration/test_sdxl_contract", "integration/test_engine_accelerate", "integration/test_sd3_cache",
    "integration/test_engine_ddp", "integration/test_engine_fsdp", "integration/test_engine_pipeline", "integration/test_hub_runs", "integration/test_family_runs",
    "integration/test_several_data_sets", "integration/test_cache_tools", "integration/test_engine_doors",
    "integration/test_resume_by_step", "integration/test_sdxl_bad_input", "integration/test_cache_guard",
    "integration/test_distributed_ranks", "integration/test_cached_start",
    "launchers/test_real_job", "launchers/test_demo", "launchers/test_sd3_light",
    "simulated_npu/test_launchers", "simulated_npu/test_training", "simulated_npu/test_training_sd3",
    "simulated_npu/test_accelerate", "simulated_npu/test_training_flux", "simulated_npu/test_doctor",
    "simulated_npu/test_bad_input", "simulated_npu/test_attention_runs", "simulated_npu/test_run",
)  # fmt: skip
HERE = Path(__file__).parent
NIGHTLY = "DIFFTRAIN_NIGHTLY"  # set by test/nightly.sh


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of long files first; within a file they stay in order. Leave out the nightly ones, unless asked for."""
    if not os.environ.get(NIGHTLY):
        nightly = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=nightly)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    places = {HERE / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture(autouse=True, scope="module")
def own_logging() -> Iterator[None]:
    """Leave the log to the next file as it was: a run in this process keeps it from propagating."""
    log = logging.getLogger("difftrain")
    handlers, level, propagate = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagate
    log.setLevel(level)


_frozen = 0  # modules that no garbage collection looks through


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later garbage collection: a million objects that stay; and collect less often.

    A tenth of the time of the tests of models went into looking for garbage among modules that were just built.
    """
    _freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


def _freeze() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Leave no process group to the next file: accelerate and DeepSpeed make one in a single process, and keep it.

    What a test was the first to import is left out of later garbage collections, too.
    """
    if len(sys.modules) > _frozen + 300:
        _freeze()
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or (nextitem is not None and nextitem.path == item.path):
        return
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
