"""The first module at which something goes wrong: calls walked forward in the order of execution, then backward.

Nothing here knows what goes wrong: two runs part (report/trace.py), or values are no longer finite (train/diagnosis/non_finite.py).
A predicate tells of each tensor by name whether it is as it should be.

Forward, tensors are looked at in the order of time: a module's inputs as it is entered, its outputs as it is left. Where
the first bad one is an output, the module that made it is named: all that it read was good. Where it is an input, nobody
made it but the code of the module around, between two of its parts (attention is such code): that one is named.

Backward, gradients are looked at in the order in which they came. A module whose own share of the gradient of an input is
bad is named: what came to its outputs was good. Where only the sum over all that read a tensor is bad, the innermost modules
whose share is not known are named, the last one first; where there is none, the module that made the tensor: what became of it
since is code between modules, or the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

ROOT = "root"  # what the trained network itself is called; modules inside have their own names
SHARE = "share"  # MODULE/CALL/PLACE/share: what this call alone hands back of the gradient of an input
Good = Callable[[str], bool | None]  # None: nothing is known of it


@dataclass
class ModuleCall:
    """One call of a module. call: "MICRO.NUMBER". entered, exited: ticks of one clock. inputs, outputs: place -> tensor."""

    module: str
    call: str
    kind: str
    entered: int
    exited: int = -1
    inputs: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)

    @property
    def micro(self) -> int:
        """Return the number of the micro batch."""
        return int(self.call.partition(".")[0])

    def within(self, other: ModuleCall) -> bool:
        """Tell whether it ran inside another call."""
        return other.entered < self.entered and self.exited < other.exited


@dataclass(frozen=True)
class Parting:
    """Where it begins. place: "output.0" of the module. tensor: the name under which it was measured first.

    between: forward, the part of the module that is the first to read what is bad. maker: backward, the module whose
    output it is the gradient of. readers: backward, other modules that read that tensor. good: modules that ran before
    with nothing bad, in the order of time.
    """

    direction: Literal["forward", "backward", "parameter"]
    module: str
    kind: str
    call: str
    role: str
    tensor: str
    between: str = ""
    maker: str = ""
    readers: tuple[str, ...] = ()
    good: tuple[str, ...] = ()


def first_parting(
    calls: Sequence[ModuleCall],
    value: Good,
    gradient: Good,
    gradients: Iterable[str],
    parameter: Good,
    parameters: Iterable[str],
) -> Parting | None:
    """Walk the micro batches one after the other, each forward and backward, then the parameters' gradients.

    gradients: names of tensors in the order in which theirs came.
    """
    arrived = list(gradients)
    for micro in sorted({call.micro for call in calls}):
        own = [call for call in calls if call.micro == micro]
        names = {name for call in own for name in (*call.inputs.values(), *call.outputs.values())}
        names |= {_share(call, role) for call in own for role in call.inputs}
        arrivals = [name for name in arrived if name in names]
        parting = _forward(own, value) or _backward(own, gradient, arrivals)
        if parting is not None:
            return _without_itself(parting)
    parting = _of_parameters(calls, parameter, parameters)
    return None if parting is None else _without_itself(parting)


def _without_itself(parting: Parting) -> Parting:
    """Leave out of the modules that were good the one that is named: an earlier call, or what came to its outputs."""
    return replace(parting, good=tuple(name for name in dict.fromkeys(parting.good) if name != parting.module))


def _forward(calls: Sequence[ModuleCall], good: Good) -> Parting | None:
    # --- every look at a tensor, in the order of time
    looks = [(call.entered, call, call.inputs) for call in calls]
    looks += [(call.exited, call, call.outputs) for call in calls]
    looks.sort(key=lambda look: look[0])
    passed: list[str] = []
    for _, call, tensors in looks:
        bad = [(role, name) for role, name in tensors.items() if good(name) is False]
        if not bad:
            if tensors is call.outputs:
                passed.append(call.module)
            continue

        # --- an output: who made it; an input: the code around, between two modules
        role, name = bad[0]
        before = tuple(passed)
        if tensors is call.outputs:
            return Parting("forward", call.module, call.kind, call.call, role, name, good=before)
        around = _around(call, calls)
        between = f"{call.module} {role}" if around is not call else ""
        at = role if around is call else next(iter(around.outputs), "output")
        return Parting("forward", around.module, around.kind, around.call, at, name, between=between, good=before)
    return None


def _backward(calls: Sequence[ModuleCall], good: Good, arrivals: Sequence[str]) -> Parting | None:
    makers: dict[str, ModuleCall] = {}
    shares = {_share(call, role): (call, role) for call in calls for role in call.inputs}
    for call in sorted(calls, key=lambda ended: ended.exited):
        for name in call.outputs.values():
            makers.setdefault(name, call)
    passed: list[str] = []
    for name in arrivals:
        if good(name) is not False:
            passed += [makers[name].module] if name in makers else []
            continue
        before = tuple(passed)
        if name in shares:
            call, role = shares[name]
            maker = makers.get(call.inputs[role])
            made_by = maker.module if maker is not None else ""
            return Parting("backward", call.module, call.kind, call.call, role, name, maker=made_by, good=before)

        # --- innermost readers, those that were entered last first: their backward ran first
        maker = makers.get(name)
        reading = sorted((call for call in calls if name in call.inputs.values()), key=lambda call: -call.entered)
        inner = [call for call in reading if not any(other.within(call) for other in reading)]
        inner = [call for call in inner if good(_share(call, _role(call.inputs, name))) is None]
        if maker is None and reading:  # made by the code of the module around them
            maker = _around(reading[-1], calls)
        if not inner:
            # a module that returns what its last part made: the code that uses it is behind the outer one
            maker = max(
                (call for call in calls if name in call.outputs.values()), key=lambda c: c.exited, default=maker
            )
            assert maker is not None, "a gradient of what nobody made and nobody read"
            role = next((role for role, tensor in {**maker.inputs, **maker.outputs}.items() if tensor == name), name)
            return Parting(
                "backward", maker.module, maker.kind, maker.call, role, name, maker=maker.module, good=before
            )
        first = inner[0]
        others = tuple(dict.fromkeys(call.module for call in inner[1:]))
        return Parting(
            "backward", first.module, first.kind, first.call, _role(first.inputs, name), name,
            maker=maker.module if maker is not None else "", readers=others, good=before,
        )  # fmt: skip
    return None


def _around(call: ModuleCall, calls: Sequence[ModuleCall]) -> ModuleCall:
    """Return the innermost call in which another ran; the outermost is in none but itself."""
    return max((outer for outer in calls if call.within(outer)), key=lambda outer: outer.entered, default=call)


def _share(call: ModuleCall, role: str) -> str:
    return f"{call.module}/{call.call}/{role}/{SHARE}"


def _role(tensors: Mapping[str, str], name: str) -> str:
    return next(role for role, tensor in tensors.items() if tensor == name)


def _of_parameters(calls: Sequence[ModuleCall], good: Good, parameters: Iterable[str]) -> Parting | None:
    """Look at parameters module by module, the one that was entered last first."""
    entered: dict[str, ModuleCall] = {}
    for call in calls:
        entered.setdefault(call.module, call)
    order = sorted(parameters, key=lambda name: -_owner(name, entered).entered)
    passed: list[str] = []
    for name in order:
        call = _owner(name, entered)
        if good(name) is False:
            return Parting("parameter", call.module, call.kind, call.call, name, name, good=tuple(passed))
        passed.append(call.module)
    return None


def _owner(parameter: str, calls: Mapping[str, ModuleCall]) -> ModuleCall:
    """Return the first call of the innermost module that holds a parameter and was called."""
    module = parameter.rpartition(".")[0]
    while module and module not in calls:
        module = module.rpartition(".")[0]
    return calls.get(module) or calls.get(ROOT) or ModuleCall(ROOT, "0.0", "", 0)
