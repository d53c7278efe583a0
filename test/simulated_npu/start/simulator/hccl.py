"""Process groups of the backend "hccl": c10d's, over gloo."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
from typing import Any

import torch.distributed as dist

from simulator import libraries, switches


def install() -> None:
    """Take the place of torch_npu's HCCL in c10d's table of backends."""
    plugins = dist.Backend._plugins
    plugins["HCCL"] = plugins["HCCL"]._replace(creator_fn=_make)


def _make(options: Any, _backend_options: Any) -> Any:
    store = dist.PrefixStore("simulated_hccl", options.store)
    gloo = dist.ProcessGroupGloo(store, options.group_rank, options.group_size, timeout=options.timeout)
    return _compiled().Hccl(gloo, dist.PrefixStore("simulated_devices", options.store), switches.strict())


@functools.cache
def _compiled() -> Any:
    path = str(libraries.folder() / "simulated_hccl.so")
    loader = importlib.machinery.ExtensionFileLoader("simulated_hccl", path)
    spec = importlib.util.spec_from_loader("simulated_hccl", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
