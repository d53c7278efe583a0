"""Blocks whose weights wait in host memory, and come to the device before they run forward and backward.

Weights that are held move one way: the host's copy stays, the device's is dropped. Those that are trained, where updates
are made during the backward pass, go back behind their update, with their optimizer state, and the memory of a third
block is one whose copy is on its way out; between steps all of them are on the host, where checkpoints and averages find
them. More blocks take part than wait: one runs, the next one of them is on its way on a stream of its own, and all others
have no memory on the device. They lie evenly among the blocks that stay, which compute while a copy is under way.

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
    from torch.optim import Optimizer

    from difftrain.device.torch_device import Device

RESIDENT = 2  # of those that take part, on the device at once: the one that runs and the next
LEAVING = 1  # and of trained ones the last
_CHUNK = 1 << 28  # bytes of pinned memory taken at once: allocators round up to powers of two
_ALIGNED = 512


class SwapPlan(NamedTuple):
    """Which blocks take part, by number, and what that takes and saves. Units: bytes.

    host: of their copies; device: of those that are there at once, at most; traffic: copied to the device in a forward and
    backward pass, with what of it is optimizer state; returned: copied back. weights: of these on the host. at_turn: on the
    device between forward and backward pass. behind: of trained ones, for each that takes part what is on the device in
    its backward pass, and which share of the model's blocks are not behind theirs.
    """

    blocks: tuple[int, ...]
    host: int
    device: int
    traffic: int
    returned: int
    weights: int
    at_turn: int
    behind: tuple[tuple[int, float], ...] = ()

    def most_with(self, step: float, backward: float) -> float:
        """Return the most that blocks and a step take together. backward: the most of its backward pass.

        Of a step's memory blocks behind their backward need none; where activations are computed again it is small anyway.
        """
        if not self.returned:
            return self.device + step
        return max(self.at_turn + step, *(size + min(backward, share * step) for size, share in self.behind))

    @property
    def saved(self) -> int:
        """Return by how much less the device holds."""
        return self.host - self.device


def plan_swap(sizes: Sequence[int], waiting: int, state: float | None = None) -> SwapPlan:
    """Choose the blocks of which so many wait at any time. sizes: what could move of each block, in bytes, in order.

    state: bytes of optimizer state for a byte of weights that are trained; None: they are held. Raises ValueError where
    more are to wait than there are beside those that are on the device.
    """
    able, trained = [number for number, size in enumerate(sizes) if size], state is not None
    if waiting > most_waiting(sizes, trained=trained):
        raise ValueError(f"{waiting} blocks cannot wait: at most {most_waiting(sizes, trained=trained)}")
    count = waiting + resident(trained=trained)
    blocks = tuple(able[(2 * i + 1) * len(able) // (2 * count)] for i in range(count))
    moved = [sizes[number] for number in blocks]
    if state is None:
        # two stay at either end, where a pass turns round
        traffic = sum(moved[RESIDENT:]) + sum(moved[:-RESIDENT])
        return SwapPlan(
            blocks, sum(moved), max(a + b for a, b in pairwise(moved)), traffic, 0, sum(moved), sum(moved[-RESIDENT:])
        )
    # they begin on the host, two stay at the end, and all go back, with their state
    weights, states = sum(moved), round(state * sum(moved))
    behind = []
    for index, number in enumerate(blocks):
        at_once = moved[max(0, index - 1) : index + 1 + LEAVING]  # the next one, this one, and the one on its way out
        behind.append((round((1 + state) * sum(at_once)), min(1.0, (number + 2) / len(sizes))))
    traffic, most = weights + sum(moved[:-RESIDENT]) + states, max(size for size, _ in behind)
    return SwapPlan(
        blocks, weights + states, most, traffic, weights + states, weights, sum(moved[-RESIDENT:]), tuple(behind)
    )


def resident(*, trained: bool) -> int:
    """Return how many of the blocks that take part are on the device at once."""
    return RESIDENT + LEAVING * trained


def most_waiting(sizes: Sequence[int], *, trained: bool = False) -> int:
    """Return how many blocks can wait at most."""
    return max(0, sum(1 for size in sizes if size) - resident(trained=trained))


def movable(
    name: str, block: nn.Module, frozen: Collection[str], *, trained: bool = False
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the tensors of a block that may move: owner, its name there, value. frozen: names of weights that never change.

    trained: what is trained moves, too. Codes and scales of a layer in few bits are of what never changes; the table of
    its levels is small, and stays.
    """
    for inside, module in block.named_modules():
        prefix = f"{name}.{inside}." if inside else f"{name}."
        for own, parameter in module.named_parameters(recurse=False):
            if trained if parameter.requires_grad else f"{prefix}{own}" in frozen:
                yield module, own, parameter
        if isinstance(module, QuantisedLayer) and f"{prefix}weight" in frozen:
            yield module, "scale", module.scale


def movable_bytes(
    units: Sequence[tuple[str, nn.Module]], frozen: Collection[str], *, trained: bool = False
) -> list[int]:
    """Return what could move of each block, in bytes; blocks may be without memory."""
    return [
        sum(value.numel() * value.element_size() for _, _, value in movable(name, block, frozen, trained=trained))
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
        return self.take(value).copy_(value)

    def take(self, value: Tensor) -> Tensor:
        """Return pinned memory for a tensor like this one."""
        size = value.numel() * value.element_size()
        if self._used + size > self._piece.numel():
            most = max(size, min(_CHUNK, self._remaining))
            self._piece, self._used = torch.empty(most, dtype=torch.uint8, pin_memory=True), 0
        host = self._piece[self._used : self._used + size].view(value.dtype).view(value.shape)
        aligned = -(-size // _ALIGNED) * _ALIGNED
        self._used += aligned
        self._remaining = max(_ALIGNED, self._remaining - aligned)
        return host


class MovingBlock:
    """A block that takes part: its tensors on the device, with or without memory, and their copies on the host.

    Of a weight that is trained the parameter shows whichever of the two is right, so that whoever reads it between steps
    finds it. Its optimizer state lies beside it: `states` is the optimizer's own table.
    """

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []  # on the device, on the host
        self.trained: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.is_there = self.has_states = False
        self.ready: Any = None  # event behind the copy that is under way
        self.leaving: Any = None  # behind the one on the way out; True where nothing has to be waited for
        self._hosts: dict[tuple[int, str], Tensor] = {}  # where states wait

    def fill(self) -> int:
        """Give the tensors memory in the current stream, and return how many bytes are to be copied into it."""
        for tensor, host in self.pairs:
            tensor.untyped_storage().resize_(host.numel() * host.element_size())
        self.is_there = True
        return sum(_size(host) for _, host in self.pairs)

    @torch.no_grad()
    def copy(self) -> None:
        """Copy from the host; autograd does not count it as a change."""
        for tensor, host in self.pairs:
            tensor.data.copy_(host, non_blocking=True)

    def show(self, *, here: bool) -> None:
        """Let parameters that are trained be what is on the device, or on the host."""
        for parameter, tensor, host in self.trained:
            parameter.data = tensor.data if here else host

    def empty(self) -> None:
        """Give the memory on the device back."""
        self.show(here=False)
        for tensor, _ in self.pairs:
            tensor.untyped_storage().resize_(0)
        self.is_there, self.ready, self.leaving = False, None, None

    # ------------------------------------------------------------------ optimizer state

    def fetch_states(self, optimizer: Optimizer) -> tuple[int, list[tuple[Tensor, Tensor]]]:
        """Give state on the device memory in the current stream; return its bytes, and what is to be copied into what."""
        pairs, self.has_states = [], True
        groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
        for parameter, here, _ in self.trained:
            group = groups.get(id(parameter), {})
            on_device = bool(group.get("fused") or group.get("capturable"))  # counters of steps, too
            for key, value in _tensors_of(optimizer, parameter):
                if value.numel() > 1:
                    self._hosts[id(parameter), key] = value
                    optimizer.state[parameter][key] = torch.empty_like(value, device=here.device)
                    pairs.append((optimizer.state[parameter][key], value))
                elif on_device:
                    optimizer.state[parameter][key] = value.to(here.device)
        return sum(_size(host) for _, host in pairs), pairs

    @torch.no_grad()
    def give_back(self, optimizer: Optimizer, pinned: bool) -> tuple[int, list[Tensor]]:
        """Copy weights and state to the host in the current stream; return the bytes, and what memory that still reads."""
        for _, here, host in self.trained:
            host.copy_(here, non_blocking=True)
        states = [(p, key, value) for p, _, _ in self.trained for key, value in _tensors_of(optimizer, p)]
        states = [(p, key, value) for p, key, value in states if value.numel() > 1]
        new = [value for p, key, value in states if not _like(self._hosts.get((id(p), key)), value)]
        room = PinnedMemory(sum(_size(value) + _ALIGNED for value in new)) if pinned and new else None
        for parameter, key, value in states:
            kept = self._hosts.get((id(parameter), key))
            if kept is None or not _like(kept, value):
                kept = torch.empty_like(value, device="cpu") if room is None else room.take(value)
            optimizer.state[parameter][key] = kept.copy_(value, non_blocking=True)
            self._hosts[id(parameter), key] = kept
        self.has_states = False
        size = sum(_size(host) for _, _, host in self.trained) + sum(_size(value) for _, _, value in states)
        return size, [value for _, _, value in states]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _like(host: Tensor | None, value: Tensor) -> bool:
    return host is not None and host.shape == value.shape and host.dtype == value.dtype


def _tensors_of(optimizer: Optimizer, parameter: nn.Parameter) -> list[tuple[str, Tensor]]:
    """Return the tensors of a weight's state; paged memory moves by itself."""
    state = optimizer.state.get(parameter, {})
    return [(k, v) for k, v in state.items() if isinstance(v, torch.Tensor) and not getattr(v, "is_paged", False)]


class BlockSwap:
    """Let blocks of a module wait in host memory, so many at any time; made before the module goes to the device.

    trained: what is trained of them waits, too; then `optimizer` is to be set, once it is made. moved_bytes, returned_bytes:
    copied to the device, and back, so far.
    """

    optimizer: Optimizer

    def __init__(
        self,
        units: Sequence[tuple[str, nn.Module]],
        frozen: Collection[str],
        waiting: int,
        device: Device,
        *,
        trained: bool = False,
    ) -> None:
        self._trained, self._device = trained, device
        sizes = movable_bytes(units, frozen, trained=trained)
        self.plan = plan_swap(sizes, waiting, 0.0 if trained else None)
        self.moved_bytes = self.returned_bytes = 0
        self._stream = None if device.module is None else device.module.Stream(device=device.torch_device)
        room = PinnedMemory(self.plan.host + _ALIGNED * len(self.plan.blocks)) if device.pin else None
        self._blocks = [self._take(*units[number], frozen, room) for number in self.plan.blocks]
        for index, number in enumerate(self.plan.blocks):
            self._watch(index, units[number][1])

    def sentence(self, blocks: int) -> str:
        """Say what waits."""
        plan, waiting = self.plan, len(self._blocks) - resident(trained=self._trained)
        back = " and back, and their optimizer state with them," if self._trained else ""
        return (
            f"{waiting} of {blocks} blocks wait in host memory: {plan.weights / 1e6:,.1f} MB of weights there, at most "
            f"{plan.device / 1e6:,.1f} of them on the device, {plan.traffic / 1e6:,.1f} copied{back} for a micro batch"
        )

    def _take(self, name: str, block: nn.Module, frozen: Collection[str], room: PinnedMemory | None) -> MovingBlock:
        """Bring a block's weights to where they wait; on the device stay tensors without memory."""
        taken = MovingBlock()
        owners: dict[nn.Module, dict[str, Tensor]] = {}
        for module, own, value in list(movable(name, block, frozen, trained=self._trained)):
            host = value.detach().contiguous()
            host = host if room is None else room.copy(host)
            here: Tensor = torch.empty_like(host, device=self._device.torch_device)
            here.untyped_storage().resize_(0)
            taken.pairs.append((here, host))
            if value.requires_grad:  # the module goes to the device next, and finds it there
                parameter: Any = value
                parameter.data = here
                taken.trained.append((parameter, here, host))
                continue
            if own in module._parameters:
                here = torch.nn.Parameter(here, requires_grad=False)
                taken.pairs[-1] = here, host
            setattr(module, own, here)
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
        once one of this block runs, and what is updated during the backward pass has been.
        """
        last = len(self._blocks) - 1
        following = index - 1 if backward else index + 1
        following = following if 0 <= following <= last else (1 if index == 0 else last - 1)
        for other, block in enumerate(self._blocks):
            if block.is_there and other not in (index, following):
                self._leave(block)
        for number in (index, following):
            block = self._blocks[number]
            if block.leaving is not None:  # it goes on where it is
                self._left(block)
            if not block.is_there or (backward and block.trained and not block.has_states):
                self._fetch(block, states=backward)
            if number == index:
                self._arrived(block)

    def settle(self) -> None:
        """Let what is trained be read on the host from now on: the module has gone to the device."""
        for block in self._blocks:
            block.show(here=False)

    def rest(self) -> None:
        """Bring all that is trained to the host, and wait for it: between steps checkpoints and averages read it there."""
        if not self._trained:
            return
        for block in self._blocks:
            if block.is_there:
                self._leave(block)
            if block.leaving is not None:
                self._left(block)
                block.empty()
        if self._stream is not None:
            self._stream.synchronize()

    def _fetch(self, block: MovingBlock, *, states: bool) -> None:
        """Begin to copy a block. Its memory may just have been another's: the copy waits for what uses it."""
        weights = not block.is_there
        size = block.fill() if weights else 0
        pairs: list[tuple[Tensor, Tensor]] = []
        if states and block.trained and not block.has_states:
            of_states, pairs = block.fetch_states(self.optimizer)
            size += of_states
        self.moved_bytes += size

        def copy() -> None:
            if weights:
                block.copy()
            for tensor, host in pairs:
                tensor.copy_(host, non_blocking=True)

        if self._stream is None:
            copy()
        else:
            module = self._device.module
            self._stream.wait_stream(module.current_stream(self._device.torch_device))
            with module.stream(self._stream):
                copy()
                block.ready = self._stream.record_event()
        if weights:
            block.show(here=True)

    def _arrived(self, block: MovingBlock) -> None:
        """Let the current stream wait for the copy of a block."""
        if block.ready is not None:
            self._device.module.current_stream(self._device.torch_device).wait_event(block.ready)
            block.ready = None

    def _leave(self, block: MovingBlock) -> None:
        """Give a block's memory back; of one that has been updated once it is on the host, which is looked at next time."""
        self._arrived(block)
        if block.leaving is not None:
            self._left(block)
        elif block.has_states:
            self._give_back(block)
            return
        block.empty()

    def _give_back(self, block: MovingBlock) -> None:
        """Begin to copy what has been updated to the host."""
        if self._stream is None:
            size, _ = block.give_back(self.optimizer, pinned=False)
            block.leaving = True
        else:
            module = self._device.module
            self._stream.wait_stream(module.current_stream(self._device.torch_device))
            with module.stream(self._stream):
                size, read = block.give_back(self.optimizer, pinned=self._device.pin)
                for tensor in read:  # the optimizer lets go of it, and its memory is of another stream
                    tensor.record_stream(self._stream)
                block.leaving = self._stream.record_event()
        self.returned_bytes += size

    def _left(self, block: MovingBlock) -> None:
        """Let the current stream wait for the copy on the way out."""
        if block.leaving is not True and block.leaving is not None:
            self._device.module.current_stream(self._device.torch_device).wait_event(block.leaving)
        block.leaving = None


class _FromHost:
    """Give a state dict the host's copies: the tensors on the device may be without memory."""

    def __init__(self, hosts: dict[str, Tensor]) -> None:
        self._hosts = hosts

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for own, host in self._hosts.items():
            full = f"{prefix}{own}"
            if full in state and not state[full].is_meta:  # of layers in few bits a state dict has shapes alone
                state[full] = host
