"""torch's own compiler for real: generated, compiled by a C++ compiler and run, on the CPU."""

from __future__ import annotations

import shutil
import time

import pytest
import torch
from engines import built, config, one_thread, run, weights  # noqa: F401
from torch._dynamo.utils import counters

from difftrain.testing.family import TinyFamily, tiny_step
from difftrain.train.diagnosis.non_finite import NonFinite
from difftrain.train.state import TrainedModel


@pytest.mark.nightly
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


@pytest.mark.flags("torch_compile")
def test_the_module_that_made_a_nan_is_found_inside_a_compiled_block() -> None:
    """The step is run once more as the blocks are written: what is compiled has no modules inside."""
    torch._dynamo.reset()
    engine = built(config({"compile": True, "compile_backend": "aot_eager"}), TinyFamily())
    run(engine, 0, 1)
    with torch.no_grad():
        engine.root.get_parameter("blocks.1.1.weight")[0, 0] = float("nan")
    micro = tiny_step(1, 8)
    assert float(engine.step(micro, {"samples": 8.0}).skipped)
    model = TrainedModel(engine.family, engine.parts, engine, None)  # type: ignore[arg-type]
    found = NonFinite(model, engine.ranks, lambda _: micro, lambda _: 8)(2, skipped=1, updated=0)
    assert " blocks.1.1 (Linear)" in found and "blocks.1.1.weight" in found
    torch._dynamo.reset()
