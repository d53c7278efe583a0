"""Files of the engine: readable by safetensors itself, and every value back with its type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from difftrain.checkpoint.tensor_files import DTYPES, write_safetensors
from difftrain.contracts import TrainingFault
from difftrain.engine.snapshot import HostBuffers, shares
from difftrain.optim.state import decode, encode


def test_every_dtype_and_shape_reads_back(tmp_path):
    tensors = {
        f"{name}.{i}": torch.randint(0, 2, shape).to(dtype)
        for name, dtype in DTYPES.items()
        for i, shape in enumerate([(), (0,), (3,), (2, 0, 5), (3, 5, 7)])
    }
    tensors["turned"] = torch.randn(4, 6).t()
    tensors["last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    path = tmp_path / "a.safetensors"
    write_safetensors(path, tensors, {"words": "Grüße"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )
        assert found[name].data_ptr() % max(1, tensor.element_size()) == 0


def test_a_full_disk_is_an_os_error():
    with pytest.raises(OSError, match=r"No space .*on device"):
        write_safetensors(Path("/dev/full"), {"a": torch.ones(1 << 20)}, {})


def test_values_come_back_with_their_types():
    value = {
        "none": None,
        "true": True,
        "int": 2**70,
        "float": 0.1 + 0.2,
        "inf": float("-inf"),
        "text": "ü",
        "list": [1, (2.0, [])],
        "dict": {1: "a", (2, 3): {"x": ()}, "tensor": 5},
        "dtype": torch.bfloat16,
        "tensor": torch.randn(3),
        "inside": ({"deep": torch.zeros(())},),
    }
    kept: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "p", kept.__setitem__))
    back = decode(json.loads(text), kept.__getitem__)
    assert kept.keys() == {"p/tensor", "p/inside/0/deep"}
    assert back["tensor"] is value["tensor"] and back["inside"][0]["deep"] is value["inside"][0]["deep"]
    for each in (back, value):
        del each["tensor"], each["inside"]
    assert back == value
    assert type(back["list"][1]) is tuple and type(back["true"]) is bool and type(back["int"]) is int
    with pytest.raises(TrainingFault, match="keeps p/f as a function"):
        encode({"f": lambda: None}, "p", kept.__setitem__)


def test_shares_are_even_whole_and_the_same_everywhere():
    sizes = {f"w{i}": (i * 7919) % 101 for i in range(200)}
    found = shares(sizes, 8)
    assert sorted(name for share in found for name in share) == sorted(sizes)
    totals = [sum(sizes[name] for name in share) for share in found]
    assert max(totals) - min(totals) <= 101
    assert shares(dict(reversed(sizes.items())), 8) == found
    assert shares({"a": 1}, 3) == [["a"], [], []]


def test_buffers_are_used_again_and_follow_a_new_shape():
    buffers = HostBuffers()
    first = buffers.copy([("a", torch.ones(3))])["a"]
    second = buffers.copy([("a", torch.zeros(3))])["a"]
    assert first is second and float(first.sum()) == 0.0
    assert buffers.copy([("a", torch.ones(4))])["a"].shape == (4,)
