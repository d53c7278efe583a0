"""Every call of every module of the root, and of frozen ones, in a step: in which order, with which tensors, and what their gradients were.

1. `before_forward` puts hooks on all modules, the first time; `after_forward` ends a micro batch's own forward pass. What
   runs behind it, until the next one, is the backward pass: a block that is recomputed there is not taken for a call.
2. A tensor is measured where it is seen first, by the name of that place: the output of one module that is the input of
   the next is one tensor. A tensor that was changed in place since is another one.
3. Gradients come through hooks of those very tensors, in the order of the backward pass. What a tensor gets back is the sum
   over all that read it; the share of each module without parts comes from the node of the graph that makes it.
4. No hook returns anything and no node is put into the graph, so a step is the same to the bit with it and without.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from difftrain.report.compare.parting import ROOT, SHARE, ModuleCall

if TYPE_CHECKING:
    from torch import nn

    from difftrain.contracts import Batch, Inputs

T = TypeVar("T")
_NODES = 64  # of the graph between the inputs and outputs of a module without parts


class ModuleCalls(Generic[T]):
    """Observe steps of an engine (contracts.StepObserver). measure: what is kept of a tensor; no reference to it.

    frozen: modules by name that are looked at too where a step runs them, such as the VAE and text encoders.
    """

    def __init__(
        self, root: nn.Module, measure: Callable[[Tensor], T], frozen: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> None:
        self._root, self._measure = root, measure
        named = {name: dict(module.named_modules(prefix=name)) for name, module in frozen.items()}
        self._modules = {id(module): module for inside in named.values() for module in inside.values()}
        self._names = {id(module): name for inside in named.values() for name, module in inside.items()}
        self._modules |= {id(module): module for module in root.modules()}
        self._names |= {id(module): name or ROOT for name, module in root.named_modules()}
        self._hooks: list[Any] = []
        self.clear()

    def clear(self) -> None:
        """Forget everything that was seen."""
        self.calls: list[ModuleCall] = []
        self.values: dict[str, T] = {}
        self.gradients: dict[str, T] = {}  # in the order in which they came
        self.parameters: dict[str, T] = {}
        self.terms: list[dict[str, T]] = []  # of the loss, by micro batch
        self.targets: list[dict[str, T]] = []  # what the loss compares with, by micro batch
        self.batches: list[Batch] = []
        self.scale = 1.0
        self._micro: int | None = None
        self._clock = 0
        self._open: list[tuple[ModuleCall, dict[str, Any]]] = []  # with the nodes of the graph that made its inputs
        self._counts: dict[tuple[int, str], int] = {}
        self._known: dict[int, tuple[Any, int, str]] = {}  # id -> (weak reference, version, name)

    # ------------------------------------------------------------------ what the engine calls

    def before_forward(self, number: int, batch: Batch) -> None:
        """Look on from here."""
        if not self._hooks:
            for module in self._modules.values():
                self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(self._leave, with_kwargs=True))
        self._micro = number
        self.batches.append(batch)

    def after_forward(self, inputs: Inputs, terms: Mapping[str, Tensor]) -> None:
        """Take what the loss is made of; calls from here on are recomputations."""
        self._micro = None
        self._open.clear()
        self.terms.append({name: self._measure(value.detach()) for name, value in terms.items()})
        compared = {"target": inputs.target, "weight": inputs.weight, "mask": inputs.mask, **inputs.aux_targets}
        self.targets.append({name: self._measure(tensor) for name, tensor in compared.items() if tensor is not None})

    def after_backward(self, gradients: Iterator[tuple[str, Tensor]], scale: float) -> None:
        """Take the gradients of parameters, and look away."""
        self.scale = scale
        self.parameters = {name: self._measure(gradient.detach()) for name, gradient in gradients}
        self.detach()

    def detach(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._known.clear()

    # ------------------------------------------------------------------ what the modules call

    @torch.no_grad()
    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._micro is None:
            return
        name = self._names[id(module)]
        number = self._counts.get((self._micro, name), 0)
        self._counts[self._micro, name] = number + 1
        call = ModuleCall(name, f"{self._micro}.{number}", type(module).__name__, self._tick())
        nodes: dict[str, Any] = {}
        self._open.append((call, nodes))
        for role, tensor in tensors_in({**self._by_name(module, args), **kwargs}, "input"):
            call.inputs[role] = self._name(tensor, call, role)
            if tensor.grad_fn is not None:
                nodes[role] = tensor.grad_fn

    @torch.no_grad()
    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self._micro is None:
            return
        name = self._names[id(module)]
        while self._open[-1][0].module != name:  # one that left by an exception which somebody caught
            self._open.pop()
        call, nodes = self._open.pop()
        made = list(tensors_in((output,) if isinstance(output, Tensor) else output, "output"))
        for role, tensor in made:
            call.outputs[role] = self._name(tensor, call, role)
        if nodes and next(module.children(), None) is None:
            for role, node, number in _edges([tensor.grad_fn for _, tensor in made], nodes):
                node.register_hook(partial(self._take_share, f"{call.module}/{call.call}/{role}/{SHARE}", number))
        call.exited = self._tick()
        self.calls.append(call)

    def _by_name(self, module: nn.Module, args: tuple[Any, ...]) -> dict[str, Any]:
        """Name positional arguments: the root's by their own names, which people know, all others by their number."""
        if module is self._root:
            return dict(zip(inspect.signature(module.forward).parameters, args))
        return {str(number): value for number, value in enumerate(args)}

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    # ------------------------------------------------------------------ tensors

    def _name(self, tensor: Tensor, call: ModuleCall, role: str) -> str:
        """Return the name of a tensor; one that is new is measured, and its gradient waited for."""
        known = self._known.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        name = f"{call.module}/{call.call}/{role}"
        self._known[id(tensor)] = (weakref.ref(tensor), tensor._version, name)
        self.values[name] = self._measure(tensor.detach())
        if tensor.requires_grad and not tensor.is_leaf:
            tensor.register_hook(partial(self._take_gradient, name))
        return name

    @torch.no_grad()
    def _take_gradient(self, name: str, gradient: Tensor | None) -> None:
        if gradient is not None:  # autograd may pass on that there is none
            self.gradients[name] = self._measure(gradient.detach())

    @torch.no_grad()
    def _take_share(self, name: str, number: int, gradients: tuple[Tensor | None, ...], _: Any) -> None:
        if (gradient := gradients[number]) is not None:
            self.gradients[name] = self._measure(gradient.detach())


def _edges(made: list[Any], read: Mapping[str, Any]) -> Iterator[tuple[str, Any, int]]:
    """Yield, by place, the node between a module's outputs and what made an input that hands its gradient to that, and
    the number of that gradient among the node's; nothing where there are several such nodes, whose sum it would be.
    """
    edges_of: dict[str, list[tuple[Any, int]]] = {role: [] for role in read}
    seen: set[Any] = set()
    waiting = [node for node in made if node is not None and not any(node is producer for producer in read.values())]
    while waiting and len(seen) < _NODES:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        for number, (before, _) in enumerate(node.next_functions):
            places = [role for role, producer in read.items() if producer is before]
            for role in places:
                edges_of[role].append((node, number))
            if before is not None and not places:
                waiting.append(before)
    for role, edges in edges_of.items():
        if len(edges) == 1 and sum(producer is read[role] for producer in read.values()) == 1:
            yield role, *edges[0]


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested tuples, lists and tables (outputs of diffusers and transformers are tables)."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, f"{path}.{number}")
