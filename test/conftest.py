"""What holds for all tests: none asks a hub; those that want one have it on this machine (support/hub_stub.py)."""

import os
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """Leave no process group to the next file: accelerate and DeepSpeed make one in a single process, and keep it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or (nextitem is not None and nextitem.path == item.path):
        return
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
