"""Make every Python process under `test/simulated_npu/run` see the simulated devices; nothing is imported early.

The fake CANN libraries must be loaded before torch_npu, whose own libraries name them; the kernels are replaced as soon
as torch_npu is there, whoever imports it. A sitecustomize that this one hides is run too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path


class _AfterTorchNpu(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Load torch_npu as ever, then install the simulator."""

    def __init__(self):
        self._loader = None
        self._looking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch_npu" or self._looking:
            return None
        self._looking = True  # asked for a second time: diffusers and we look before anybody imports
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is None or spec.loader is None:
            return None
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        from simulator import install, libraries

        libraries.load()
        self._loader.exec_module(module)
        install.install()


if "SIMULATED_NPU_LIBRARIES" in os.environ:
    sys.meta_path.insert(0, _AfterTorchNpu())


def _run_hidden():
    here = Path(__file__).resolve().parent
    others = [place for place in sys.path if Path(place or ".").resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec and spec.loader:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


_run_hidden()
