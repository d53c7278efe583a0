"""ZeRO's optimizer state and loss scale in the checkpoint format of every engine: whole tensors, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.contracts import ConfigFault, Fault
from difftrain.engine.plain import decode, encode
from difftrain.engine.state import Keep, NamedState

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from difftrain.engine.accelerate_zero_weights import ZeroMasters

_STEP = "step"
_PLACE = "_deepspeed_place"


class ZeroState:
    """See the state of an optimizer whose parameters are flat pieces of many. Collective: parameters."""

    def __init__(self, optimizer: Optimizer, kind: str, masters: ZeroMasters) -> None:
        self._optimizer, self._masters = optimizer, masters
        self._groups = NamedState(optimizer, {})
        self.kind = kind  # of the optimizer that was asked for, whatever DeepSpeed makes of it

    @property
    def owned(self) -> list[str]:
        """Return the names of the parameters of which this rank holds a piece of the state: of all, nearly."""
        return list(self._masters.weights)

    def groups(self, keep: Keep) -> list[dict[str, Any]]:
        """Encode what the optimizer has changed in its groups."""
        return self._groups.groups(keep)

    def _pieces(self) -> list[Any]:
        zero = self._masters.zero
        stage_3 = getattr(zero, "fp32_partitioned_groups_flat", None)
        return list(zero.single_partition_of_fp32_groups if stage_3 is None else stage_3)

    @torch.no_grad()
    def parameters(self, names: Iterable[str], keep: Keep) -> dict[str, Any]:
        """Encode the state of the named parameters, other names on every rank; all help to put every one together."""
        names = set(names) & self._masters.weights.keys()
        piece = self._pieces()[0]
        state = self._optimizer.state.get(piece, {})
        self._masters.link()
        found: dict[str, Any] = {name: {} for name in names}
        for name, weight in self._masters.weights.items():
            for key, value in state.items():
                cut = isinstance(value, torch.Tensor) and value.shape == piece.shape
                whole = self._masters.whole(weight, key) if cut else value
                if name in names:
                    if key == _STEP and not isinstance(whole, torch.Tensor):
                        whole = torch.tensor(float(whole))  # a number in DeepSpeed's own optimizers, no tensor
                    whole = whole.cpu() if isinstance(whole, torch.Tensor) else whole
                    found[name][key] = encode(whole, f"{name}/{key}", keep)
        return found

    @torch.no_grad()
    def load(
        self,
        states: Mapping[str, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Take encoded states and groups back; this rank keeps its pieces."""
        if len(groups) != len(self._optimizer.param_groups):
            what = f"the checkpoint's optimizer has {len(groups)} parameter groups, this one "
            raise ConfigFault([Fault("--resume", f"{what}{len(self._optimizer.param_groups)}")])
        whole = {key for state in states.values() for key, value in state.items() if key != _STEP and _is_tensor(value)}
        self._make_room(next((state for state in states.values() if state), {}), whole)
        kept: dict[str, Tensor] = {}
        for place, tensor in tensors:
            name, _, key = place.partition("/")
            if key in whole and name in self._masters.weights:
                self._masters.put(name, tensor, key)
            else:
                kept[place] = tensor.clone()
        if kept_step := next((value for place, value in kept.items() if place.endswith(f"/{_STEP}")), None):
            for piece in self._pieces():
                self._set_step(piece, kept_step)
        self._groups.load_groups(groups, kept.__getitem__)

    def _make_room(self, like: Mapping[str, Any], whole: set[str]) -> None:
        """Make the state that an optimizer makes in its first update, empty, and let DeepSpeed know its pieces."""
        optimizer = self._optimizer
        optimizer.state.clear()
        for piece in self._pieces():
            for key, value in like.items():
                if key in whole:
                    optimizer.state[piece][key] = torch.zeros_like(piece, requires_grad=False)
                elif not _is_tensor(value):
                    optimizer.state[piece][key] = decode(value, _no_tensor)
        self._masters.link()

    def _set_step(self, piece: Tensor, step: Tensor) -> None:
        group = self._optimizer.param_groups[0]
        if type(self._optimizer).__module__.startswith("deepspeed."):
            self._optimizer.state[piece][_STEP] = int(step)
        else:
            here = group.get("fused") or group.get("capturable")
            self._optimizer.state[piece][_STEP] = step.clone().to(piece.device if here else "cpu")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and "tensor" in value


def _no_tensor(name: str) -> Tensor:
    raise KeyError(name)


class LossScale:
    """DeepSpeed's dynamic loss scale, saved and loaded as torch's scaler is."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def get_scale(self) -> float:
        """Return the factor of the loss now."""
        return float(self._scaler.cur_scale)

    def state_dict(self) -> dict[str, Any]:
        """Return what torch.amp.GradScaler would, and where DeepSpeed is, which lets the scale grow a step later."""
        scaler = self._scaler
        grown = scaler.cur_iter - scaler.last_overflow_iter - 1
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1.0 / scaler.scale_factor,
            "growth_interval": int(scaler.scale_window),
            "_growth_tracker": grown % scaler.scale_window,
            _PLACE: [scaler.cur_iter, scaler.last_overflow_iter],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a scaler was."""
        scaler = self._scaler
        scaler.cur_scale = float(state["scale"])
        scaler.cur_iter, scaler.last_overflow_iter = state.get(_PLACE, (int(state["_growth_tracker"]), -1))
