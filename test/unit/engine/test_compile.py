"""Regional compile: what is compiled, by whom, where it cannot be, and what is said of it."""

from __future__ import annotations

import os
import time

import pytest
import torch
from engines import built, config, one_thread, run, weights  # noqa: F401
from refusals import is_about, names
from torch._dynamo.utils import counters

from difftrain.config.schema.sections import DataSection, DatasetSection
from difftrain.device import Device, compiling, torch_device
from difftrain.engine import make_engine
from difftrain.testing.family import TinyFamily


@pytest.fixture
def graphs():
    """Count the graphs that are made from here on."""
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()


@pytest.mark.flags("torch_compile", "dynamo_backend")
def test_blocks_train_the_same_under_the_same_names(graphs):
    seen = []

    @torch._dynamo.register_backend(name="seeing")
    def seeing(graph, inputs):
        seen.append(graph)
        return graph.forward

    family = TinyFamily(blocks=4)
    plain = built(family=family)
    expected = run(plain, 0, 4)
    assert graphs() == 0
    compiled = built(config({"compile": True, "compile_backend": "seeing"}), family)
    assert run(compiled, 0, 4) == pytest.approx(expected, rel=1e-5)
    assert weights(compiled).keys() == weights(plain).keys()
    assert graphs() == len(seen) == 1  # four blocks of one kind share their code
    (note,) = [note for note in compiled.parts.notes if note.startswith("compile: ")]
    assert is_about(note, "compile", "4 blocks", "seeing", "1 graph")


def test_kinds_are_counted_by_class_and_shapes():
    blocks = [torch.nn.Linear(4, 8), torch.nn.Linear(4, 8), torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)]
    section = config({"compile": True, "compile_backend": "eager"}).training
    said = compiling.compile_blocks(blocks, section, Device("cpu"), buckets=True)
    assert names(said, "4 blocks", "eager", "3 graphs")
    said = compiling.compile_blocks(blocks, section, Device("cpu"), buckets=False, spares=True)
    assert names(said, "4 blocks", "eager", "6 graphs")
    section = section.model_copy(update={"compile_backend": "inductor"})
    assert "minutes before" in compiling.compile_blocks(blocks, section, Device("cpu"), buckets=False)


@pytest.mark.parametrize("buckets", [False, True])
def test_buckets_of_a_data_set_change_the_shape_too(buckets):
    sets = DataSection(datasets=(DatasetSection(), DatasetSection(enable_bucket=buckets)))
    cfg = config({"compile": True, "compile_backend": "eager"}).model_copy(update={"data": sets})
    (note,) = [note for note in built(cfg).parts.notes if note.startswith("compile: ")]
    assert ("new shape" in note) == buckets


@pytest.mark.flags("dynamo_backend")
@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("inducter", "'inducter'"),
        ("cudagraphs", "cudagraphs"),
        ("tvm", "package tvm, "),
        ("openxla", "package torch_xla, "),
    ],
)
def test_a_backend_that_cannot_run_here_is_refused(backend, words):
    (fault,) = compiling.compile_faults(config({"compile": True, "compile_backend": backend}).training, Device("cpu"))
    assert words in fault
    assert compiling.compile_faults(config({"compile_backend": backend}).training, Device("cpu")) == []
    assert compiling.compile_faults(config({"compile": True}).training, Device("cpu")) == []


def test_inductor_needs_a_compiler():
    from torch._inductor import config as inductor

    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "a C++ compiler" in torch_device.why_not("inductor", "cpu")


def test_what_a_killed_compiler_left_is_swept_away(tmp_path, monkeypatch):
    """An empty library in inductor's cache ends every later run with an ImportError."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    (tmp_path / "ab").mkdir()
    whole, empty, linking = (tmp_path / "ab" / f"{name}.so" for name in ("whole", "empty", "linking"))
    whole.write_bytes(b"code")
    empty.touch()
    linking.touch()
    for path in (whole, empty):
        os.utime(path, (time.time() - 100, time.time() - 100))
    assert torch_device.sweep("aot_eager", "cpu") == 0
    section = config({"compile": True, "compile_backend": "inductor"}).training
    compiling.compile_blocks([], section, Device("cpu"), buckets=False)
    assert whole.exists() and linking.exists() and not empty.exists()


def test_the_engine_hands_them_on():
    from difftrain.device import choose
    from difftrain.distributed.ranks import Ranks

    engine = make_engine(config({"compile": True, "compile_backend": "cudagraphs"}), choose("cpu"), Ranks())
    assert len(engine.faults()) == 1
