"""torch's own compiler for real: generated, compiled by a C++ compiler and run, on the CPU."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from engines import built, config, one_thread, run, weights  # noqa: F401
from torch._dynamo.utils import counters

from difftrain.testing.family import TinyFamily


@pytest.mark.flags("torch_compile", "dynamo_backend")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_inductor_trains_what_eager_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing of an earlier run
    torch._dynamo.reset()
    counters.clear()
    family = TinyFamily(blocks=3)
    expected = built(config(), family)
    losses = run(expected, 0, 4)
    compiled = built(config({"compile": True, "compile_backend": "inductor"}), family)
    start = time.monotonic()
    assert run(compiled, 0, 4) == pytest.approx(losses, rel=1e-5)
    print(f"compiled and trained in {time.monotonic() - start:.1f} s")
    assert counters["stats"]["unique_graphs"] == 1
    assert list(tmp_path.rglob("*.so")), "nothing was compiled"
    for name, value in weights(compiled).items():
        assert torch.allclose(value, weights(expected)[name], atol=1e-5), name
    torch._dynamo.reset()
