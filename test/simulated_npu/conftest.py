"""The npu tier: every test here runs under `test/simulated_npu/run`, and is marked npu."""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm

UNDER_RUN = "SIMULATED_NPU_LIBRARIES" in os.environ
if not UNDER_RUN:  # a plain `pytest test` has no device: bash test/run_tests.sh --tier simulated_npu
    collect_ignore_glob = ["test_*.py"]


def pytest_addoption(parser):
    with contextlib.suppress(ValueError):  # the golden tier has the same flag, where both are run at once
        parser.addoption(
            "--update-golden", action="store_true", help="write golden figures anew; say why in the commit"
        )


@pytest.fixture(autouse=True, scope="session")
def warm_processes() -> Iterator[None]:
    """Fork the doors, and the ranks of small jobs, from a process that has imported what they do, torch_npu included."""
    with warm.starts_forked():
        yield


@pytest.fixture
def update_golden(request):
    """Whether to write the figures instead of comparing with them."""
    return bool(request.config.getoption("--update-golden", default=False))


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.npu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let every test begin as a user's shell does: the product keeps torch_npu from loading by itself, and children inherit."""
    os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)


@pytest.fixture
def counted():
    """Count what runs on the device in this test."""
    import simulator

    simulator.reset()
    return simulator


@pytest.fixture
def clean_memory() -> Iterator[None]:
    """Measure memory of what is alive: garbage of tests before is gone, and what a step leaves goes early and always."""
    before = gc.get_threshold()
    gc.collect()
    gc.set_threshold(200, 5, 5)
    yield
    gc.set_threshold(*before)
