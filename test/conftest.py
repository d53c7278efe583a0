"""What holds for all tests: none asks a hub; those that want one have it on this machine (support/hub_stub.py)."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
