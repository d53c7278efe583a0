"""Blocks whose weights wait in host memory, and come to the device before they run forward and backward.

Only weights that are held move, so they move one way: the host's copy stays, the device's is dropped. More blocks take
part than wait: one runs, the next one of them is on its way on a stream of its own, and all others have no memory on the
device. They lie evenly among the blocks that stay, which compute while a copy is under way.

A parameter keeps its tensor on the device, whose storage is emptied and filled: what autograd has kept of it is right
again once the block is back. On a CPU the same is done between two memories of the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from difftrain.device.quantised import QuantisedLayer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from difftrain.device.torch_device import Device

RESIDENT = 2  # of those that take part, on the device at once: the one that runs and the next
_CHUNK = 1 << 28  # bytes of pinned memory taken at once: allocators round up to powers of two
_ALIGNED = 512


class SwapPlan(NamedTuple):
    """Which blocks take part, by number, and what that takes and saves. Units: bytes.

    host: of their copies; device: of those that are there at once, at most; traffic: copied in a forward and backward pass.
    """

    blocks: tuple[int, ...]
    host: int
    device: int
    traffic: int

    @property
    def saved(self) -> int:
        """Return by how much less the device holds."""
        return self.host - self.device


def plan_swap(sizes: Sequence[int], waiting: int) -> SwapPlan:
    """Choose the blocks of which so many wait at any time. sizes: what could move of each block, in bytes, in order.

    Raises ValueError where more are to wait than there are beside the two that are on the device.
    """
    able = [number for number, size in enumerate(sizes) if size]
    if waiting > most_waiting(sizes):
        raise ValueError(f"{waiting} blocks cannot wait: at most {most_waiting(sizes)}")
    count = waiting + RESIDENT
    blocks = tuple(able[(2 * i + 1) * len(able) // (2 * count)] for i in range(count))
    moved = [sizes[number] for number in blocks]
    # two stay at either end, where a pass turns round
    traffic = sum(moved[RESIDENT:]) + sum(moved[:-RESIDENT])
    return SwapPlan(blocks, sum(moved), max(a + b for a, b in pairwise(moved)), traffic)


def most_waiting(sizes: Sequence[int]) -> int:
    """Return how many blocks can wait at most."""
    return max(0, sum(1 for size in sizes if size) - RESIDENT)


def movable(name: str, block: nn.Module, frozen: Collection[str]) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors of a block that may move: owner, its name there, value. frozen: names of weights that never change.

    Codes and scales of a layer in few bits are of them; the table of its levels is small, and stays.
    """
    for inside, module in block.named_modules():
        prefix = f"{name}.{inside}." if inside else f"{name}."
        for own, parameter in module.named_parameters(recurse=False):
            if f"{prefix}{own}" in frozen and not parameter.requires_grad:
                yield module, own, parameter
        if isinstance(module, QuantisedLayer) and f"{prefix}weight" in frozen:
            yield module, "scale", module.scale


def movable_bytes(units: Sequence[tuple[str, nn.Module]], frozen: Collection[str]) -> list[int]:
    """Return what could move of each block, in bytes; blocks may be without memory."""
    return [
        sum(value.numel() * value.element_size() for _, _, value in movable(name, block, frozen))
        for name, block in units
    ]


class PinnedMemory:
    """Hand out host memory that a device reads without the host's help, cut from large pieces."""

    def __init__(self, size: int) -> None:
        self._remaining = size  # of all that will be asked for
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def copy(self, value: Tensor) -> Tensor:
        """Return a copy in pinned memory."""
        size = value.numel() * value.element_size()
        if self._used + size > self._piece.numel():
            most = max(size, min(_CHUNK, self._remaining))
            self._piece, self._used = torch.empty(most, dtype=torch.uint8, pin_memory=True), 0
        host = self._piece[self._used : self._used + size].view(value.dtype).view(value.shape)
        aligned = -(-size // _ALIGNED) * _ALIGNED
        self._used += aligned
        self._remaining = max(_ALIGNED, self._remaining - aligned)
        return host.copy_(value)


class MovingBlock:
    """A block that takes part: its tensors on the device, with or without memory, and their copies on the host."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []  # on the device, on the host
        self.is_there = False
        self.ready: Any = None  # event behind the copy that is under way

    @torch.no_grad()
    def fill(self) -> int:
        """Give the tensors memory in the current stream, and return how many bytes are to be copied into it."""
        for tensor, host in self.pairs:
            tensor.untyped_storage().resize_(host.numel() * host.element_size())
        self.is_there = True
        return sum(host.numel() * host.element_size() for _, host in self.pairs)

    @torch.no_grad()
    def copy(self) -> None:
        """Copy from the host; autograd does not count it as a change."""
        for tensor, host in self.pairs:
            tensor.data.copy_(host, non_blocking=True)

    def empty(self) -> None:
        """Give the memory on the device back."""
        for tensor, _ in self.pairs:
            tensor.untyped_storage().resize_(0)
        self.is_there, self.ready = False, None


class BlockSwap:
    """Let blocks of a module wait in host memory, so many at any time; made before the module goes to the device.

    moved_bytes: copied to the device so far.
    """

    def __init__(
        self, units: Sequence[tuple[str, nn.Module]], frozen: Collection[str], waiting: int, device: Device
    ) -> None:
        self.plan = plan_swap(movable_bytes(units, frozen), waiting)
        self.moved_bytes = 0
        self._device = device
        self._stream = None if device.module is None else device.module.Stream(device=device.torch_device)
        room = PinnedMemory(self.plan.host + _ALIGNED * len(self.plan.blocks)) if device.pin else None
        self._blocks = [self._take(*units[number], frozen, room) for number in self.plan.blocks]
        for index, number in enumerate(self.plan.blocks):
            self._watch(index, units[number][1])

    def sentence(self, blocks: int) -> str:
        """Say what waits."""
        plan, waiting = self.plan, len(self._blocks) - RESIDENT
        return (
            f"{waiting} of {blocks} blocks wait in host memory: {plan.host / 1e6:,.1f} MB of weights there, at most "
            f"{plan.device / 1e6:,.1f} of them on the device, {plan.traffic / 1e6:,.1f} copied for a micro batch"
        )

    def _take(self, name: str, block: nn.Module, frozen: Collection[str], room: PinnedMemory | None) -> MovingBlock:
        """Bring a block's weights to where they wait; on the device stay tensors without memory."""
        taken = MovingBlock()
        owners: dict[nn.Module, dict[str, Tensor]] = {}
        for module, own, value in list(movable(name, block, frozen)):
            host = value.detach().contiguous()
            host = host if room is None else room.copy(host)
            here: Tensor = torch.empty_like(host, device=self._device.torch_device)
            here.untyped_storage().resize_(0)
            if own in module._parameters:
                here = torch.nn.Parameter(here, requires_grad=False)
            setattr(module, own, here)
            taken.pairs.append((here, host))
            owners.setdefault(module, {})[own] = host
        for module, hosts in owners.items():
            module.register_state_dict_post_hook(_FromHost(hosts))
        return taken

    def _watch(self, index: int, block: nn.Module) -> None:
        """Bring a block's weights before it runs, and before its backward pass."""

        def before(*_: Any) -> None:
            self.enter(index, backward=torch._C._current_graph_task_id() != -1)

        def behind(module: nn.Module, args: Any, outputs: Any) -> None:
            kept = [value for value in tree_leaves(outputs) if isinstance(value, torch.Tensor) and value.requires_grad]
            # what a checkpoint computes again is used at once, and by the graph of the first time
            if kept and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                torch.autograd.graph.register_multi_grad_hook(
                    kept, lambda _: self.enter(index, backward=True), mode="any"
                )

        block.register_forward_pre_hook(before)
        block.register_forward_hook(behind)

    def enter(self, index: int, *, backward: bool) -> None:
        """Have a block's weights on the device, in the current stream, and let the next one's come.

        What ran before it is done with: autograd runs what was computed last first, so no node of a later block is left
        once one of this block runs.
        """
        last = len(self._blocks) - 1
        following = index - 1 if backward else index + 1
        following = following if 0 <= following <= last else (1 if index == 0 else last - 1)
        for other, block in enumerate(self._blocks):
            if block.is_there and other not in (index, following):
                self._arrived(block)
                block.empty()
        for number in (index, following):
            if not self._blocks[number].is_there:
                self._fetch(self._blocks[number])
            if number == index:
                self._arrived(self._blocks[number])

    def _fetch(self, block: MovingBlock) -> None:
        """Begin to copy a block. Its memory may just have been another's: the copy waits for what uses it."""
        self.moved_bytes += block.fill()
        if self._stream is None:
            block.copy()
            return
        module = self._device.module
        self._stream.wait_stream(module.current_stream(self._device.torch_device))
        with module.stream(self._stream):
            block.copy()
            block.ready = self._stream.record_event()

    def _arrived(self, block: MovingBlock) -> None:
        """Let the current stream wait for the copy of a block."""
        if block.ready is not None:
            self._device.module.current_stream(self._device.torch_device).wait_event(block.ready)
            block.ready = None


class _FromHost:
    """Give a state dict the host's copies: the tensors on the device may be without memory."""

    def __init__(self, hosts: dict[str, Tensor]) -> None:
        self._hosts = hosts

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for own, host in self._hosts.items():
            full = f"{prefix}{own}"
            if full in state and not state[full].is_meta:  # of layers in few bits a state dict has shapes alone
                state[full] = host
