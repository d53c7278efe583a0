"""State of optimizers and schedules by parameter NAME, as JSON and named tensors: loads on any number of ranks, sharded or whole."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from difftrain.config.spellings.spelling import option
from difftrain.contracts import ConfigFault, Fault, TrainingFault
from difftrain.optim import inner, page_again

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


def encode(value: Any, where: str, keep: Callable[[str, Tensor], None]) -> Any:
    """Return JSON for a value; tensors in it go to `keep` under a name that starts with `where`.

    Raises TrainingFault for what cannot be stored so, a function for instance.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        keep(where, value)
        return {"tensor": where}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [encode(item, f"{where}/{index}", keep) for index, item in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [[encode(key, "", keep), encode(item, f"{where}/{key}", keep)] for key, item in value.items()]
        return {"dict": pairs}
    raise TrainingFault(f"the optimizer keeps {where} as a {type(value).__name__}, which a checkpoint cannot store")


def decode(value: Any, find: Callable[[str], Tensor]) -> Any:
    """Return what encode was given; `find` returns a tensor by its name."""
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return find(content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "dict":
        return {decode(key, find): decode(item, find) for key, item in content}
    return (list if kind == "list" else tuple)(decode(item, find) for item in content)


def check_groups(groups: list[dict[str, Any]], optimizer: Optimizer) -> None:
    """Compare how many parameter groups a checkpoint has. Raises ConfigFault."""
    if len(groups) != len(optimizer.param_groups):
        what = f"the checkpoint's optimizer has {len(groups)} parameter groups, this one "
        raise ConfigFault([Fault(option("save.resume"), f"{what}{len(optimizer.param_groups)}")])


class ScheduleState:
    """Remember how a schedule began, to tell what has changed in it since. Made before its first step."""

    def __init__(self, schedule: LRScheduler, optimizer: Optimizer) -> None:
        self._schedule, self._optimizer = schedule, optimizer
        self._start = self._state()

    def describe(self) -> dict[str, Any]:
        """Return as JSON how it began and what is different now; nothing where it cannot be said, or need not be."""
        now = self._state()
        if isinstance(self._schedule, LambdaLR) or self._start is None or now is None:
            return {}
        return {
            "start": self._start,
            "now": {key: value for key, value in now.items() if value != self._start.get(key)},
        }

    def go_to(self, position: int, facts: Mapping[str, Any], rates: list[float]) -> None:
        """Bring the schedule to a position.

        One without a formula takes back what `describe` told, where it began as this one did: the same class, arguments
        and rates. Otherwise what the user changed counts, and the steps are made again.
        """
        if isinstance(self._schedule, LambdaLR):
            if position:
                self._schedule.last_epoch = position - 1
                self._schedule.step()
        elif facts and facts["start"] == self._start:
            now = {key: decode(value, _no_tensors) for key, value in facts["now"].items()}
            self._schedule.load_state_dict({**self._schedule.state_dict(), **now})
            for group, rate in zip(self._optimizer.param_groups, rates):
                group["lr"] = rate
        else:
            for _ in range(position):
                self._schedule.step()

    def _state(self) -> dict[str, Any] | None:
        """Return its state as JSON, or None where a part of it cannot be written down."""
        kind = type(self._schedule)
        try:
            state = {key: encode(value, key, _keep_none) for key, value in self._schedule.state_dict().items()}
        except TrainingFault:
            return None
        return json.loads(json.dumps({**state, "class": f"{kind.__module__}.{kind.__name__}"}))


def _keep_none(name: str, tensor: Tensor) -> None:
    raise TrainingFault(f"the schedule keeps {name} as a tensor")


def _no_tensors(name: str) -> Tensor:
    raise KeyError(name)


Keep = Callable[[str, "Tensor"], None]
# Not state: the parameters, what the schedule sets, and how the update is computed on this device.
_NOT_STATE = {"params", "param_names", "name", "lr", "initial_lr", "fused", "foreach", "capturable", "differentiable"}


class NamedState:
    """See an optimizer's state by the names of parameters. Made before the first update.

    kind: the class whose state this is, whatever shards it.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names  # id(parameter) -> name
        worker = inner(optimizer)
        self._configured = [self._values(group) for group in worker.param_groups]
        self.kind = getattr(worker, "state_kind", f"{type(worker).__module__}.{type(worker).__name__}")

    @property
    def owned(self) -> list[str]:
        """Return the names of the parameters whose state this rank holds."""
        return [self._names[id(param)] for group in inner(self._optimizer).param_groups for param in group["params"]]

    def parameters(self, names: Iterable[str], keep: Keep) -> dict[str, Any]:
        """Encode the state of the named ones among the owned parameters."""
        names = set(names)
        worker = inner(self._optimizer)
        parameters = {}
        for group in worker.param_groups:
            for parameter in group["params"]:
                name = self._names[id(parameter)]
                if name in names:
                    state = worker.state.get(parameter, {})
                    parameters[name] = {key: encode(value, f"{name}/{key}", keep) for key, value in state.items()}
        return parameters

    def groups(self, keep: Keep) -> list[dict[str, Any]]:
        """Encode what the optimizer has changed in its groups, with the names of their parameters."""
        groups = []
        for index, group in enumerate(inner(self._optimizer).param_groups):
            before = self._configured[index]
            changed = {
                key: encode(value, f"group {index}/{key}", keep)
                for key, value in self._values(group).items()
                if key not in before or not _equal(value, before[key])
            }
            groups.append(changed)
        return groups

    def load(
        self,
        states: Mapping[str, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Take encoded states and groups back, bit by bit; tensors: of what this rank owns, and of the groups."""
        find = dict(tensors).__getitem__
        check_groups(groups, self._optimizer)
        worker = inner(self._optimizer)
        plain = worker.state_dict()
        plain["state"] = {}
        number = 0
        for group in worker.param_groups:
            for parameter in group["params"]:
                state = states[self._names[id(parameter)]]
                if state:
                    plain["state"][number] = _decoded(state, find, parameter)
                number += 1
        worker.load_state_dict(plain)
        self._put_right(plain["state"])
        self.load_groups(groups, find)

    def load_groups(self, groups: list[dict[str, Any]], find: Callable[[str], Tensor]) -> None:
        """Take back what an optimizer had changed in its groups."""
        for optimizer in {id(optimizer): optimizer for optimizer in (inner(self._optimizer), self._optimizer)}.values():
            for group, before, changed in zip(optimizer.param_groups, self._configured, groups):
                group |= copy.deepcopy(before)
                for key, value in changed.items():
                    group[key] = decode(value, lambda name: find(name).clone())

    def _put_right(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Undo casts: load_state_dict turns floats into the parameter's dtype, whatever an optimizer keeps them in.

        Of counters it says where they belong.
        """
        worker = inner(self._optimizer)
        owned = [parameter for group in worker.param_groups for parameter in group["params"]]
        for name, state in states.items():
            loaded = worker.state[owned[name]]
            for key, value in state.items():
                loaded[key] = value.to(loaded[key].device) if _is_counter(value) else value
            page_again(worker, owned[name])

    @staticmethod
    def _values(group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: copy.deepcopy(value) for key, value in group.items() if key not in _NOT_STATE}


def _decoded(state: Mapping[str, Any], find: Callable[[str], Tensor], like: Tensor) -> dict[str, Any]:
    return {key: decode(value, lambda name: _copied(find(name), like)) for key, value in state.items()}


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0


def _copied(tensor: Tensor, like: Tensor) -> Tensor:
    """Copy a stored tensor to where its parameter is, laid out as it: fused kernels want the same strides."""
    if tensor.ndim == 0:
        return tensor.clone()  # counters: the optimizer knows where it wants them
    if tensor.shape != like.shape:
        return tensor.to(like.device, copy=True)
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def merge_states(metadata: Iterable[Mapping[str, str]]) -> dict[str, dict[str, Any]]:
    """Put the states together that several files describe."""
    merged: dict[str, dict[str, Any]] = {}
    for entry in metadata:
        merged |= json.loads(entry["states"])
    return merged
