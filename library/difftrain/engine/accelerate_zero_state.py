"""Weights and optimizer state under ZeRO, which lie in pieces on the ranks, as every engine's checkpoints have them: whole tensors, by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from difftrain.engine.gradients import Arrivals
from difftrain.engine.master_weights import MasterWeights
from difftrain.optim.state import Keep, NamedState, check_groups, decode, encode

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


class ZeroMasterWeights(MasterWeights):
    """Put weights and their state together, and take them apart. Collective: value, gathered, chosen, swapped; of all weights.

    DeepSpeed's engine owns gradients and updates.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], root: nn.Module, stage: int) -> None:
        super().__init__(weights)
        self._stage = stage
        self._parameters = dict(root.named_parameters(remove_duplicate=False))
        self._arrivals = Arrivals(weights)
        self.zero: Any = None

    def bind(self, zero: Any) -> None:
        """Learn DeepSpeed's optimizer, once it is made."""
        self.zero = zero
        if getattr(zero.loss_scaler, "dynamic", False):
            zero.loss_scaler.raise_error_at_min_scale = False  # how many steps may be skipped is the loop's to say

    def link(self) -> None:
        """Let every weight know its pieces of the optimizer's state.

        DeepSpeed does so once, after the update of the first parameter group, when the others have no state yet.
        """
        if self._stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def missing_gradients(self) -> list[str]:
        """Name the weights that no backward has reached; asked once, after the first step."""
        return self._arrivals.missing()

    # ------------------------------------------------------------------ values

    def value(self, name: str) -> Tensor:
        """Return the exact value: the weight itself where it is whole and no other is kept, else a copy."""
        weight = self.weights[name]
        if self._stage < 3 and weight.dtype == torch.float32:
            return weight.detach()
        return self.full_tensor(weight)

    @torch.no_grad()
    def full_tensor(self, weight: nn.Parameter, key: str | None = None) -> Tensor:
        """Put a weight's exact value together, or with a key one of its states; fp32."""
        if self._stage == 3:
            return self.zero.get_full_hp_param(weight, key).float()
        return weight.get_full_hp_param(key)  # type: ignore[attr-defined]

    @torch.no_grad()
    def put(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Keep this rank's piece of a value, or of a state. For a value, `_refresh` brings it to the weights."""
        weight: Any = self.weights[name]
        if self._stage < 3:
            weight.set_full_hp_param(value.float(), key)
            return
        piece = weight.ds_tensor.numel()
        flat = torch.zeros(piece, dtype=torch.float32)
        begin = self.zero._get_param_partition_rank(weight) * piece
        own = value.reshape(-1)[begin : begin + piece]  # the last rank's may be short
        flat[: own.numel()] = own
        self.zero.set_local_hp_param(flat, weight, key)

    @torch.no_grad()
    def _refresh(self) -> None:
        """Make the weights that the model computes with of the exact values."""
        zero = self.zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        if zero.persistent_parameters:  # small ones are whole on every rank between steps
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        for index in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        zero.checkpoint_event_epilogue()

    @contextmanager
    def swapped(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the model compute with other weights for a while, with stage 3 on all ranks together."""
        if self._stage < 3:
            with super().swapped(weights):
                yield
            return
        try:
            for name, value in weights.items():
                self._put_complete(self.weights[name], value)
            yield
        finally:
            self._refresh()

    @torch.no_grad()
    def _put_complete(self, weight: nn.Parameter, value: Tensor) -> None:
        from deepspeed import zero

        with zero.GatheredParameters([weight], modifier_rank=0):
            weight.copy_(value)

    # ------------------------------------------------------------------ weights of the whole model

    def _is_cut(self, name: str) -> bool:
        return self._stage == 3 and name in self._parameters

    @torch.no_grad()
    def gathered(self, name: str, tensor: Tensor) -> Tensor:
        """Return all of a weight: put together where the model has nothing in its place between steps."""
        if tensor.numel() or not self._is_cut(name):
            return tensor
        from deepspeed import zero

        with zero.GatheredParameters([self._parameters[name]]):
            return self._parameters[name].detach().clone()

    def chosen(self, names: set[str], model: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds of some weights; every rank helps to put every one together."""
        for name in sorted(model):
            value = self.value(name) if name in self.weights else self.gathered(name, model[name])
            if name in names:
                yield name, value

    def load(self, tensors: Iterable[tuple[str, Tensor]], model: Mapping[str, Tensor]) -> None:
        """Take weights from a checkpoint."""
        for name, value in tensors:
            if self._is_cut(name) and name not in self.weights:
                self._put_complete(self._parameters[name], value)
            else:
                super().load([(name, value)], model)
        self._refresh()


_STEP = "step"
_SCALER_POSITION = "_deepspeed_place"


class ZeroState(NamedState):
    """See the state of an optimizer whose parameters are flat pieces of many. Collective: parameters."""

    def __init__(self, optimizer: Optimizer, kind: str, master_weights: ZeroMasterWeights) -> None:
        super().__init__(optimizer, {})
        self._master_weights = master_weights
        self.kind = kind  # of the optimizer that was asked for, whatever DeepSpeed makes of it

    @property
    def owned(self) -> list[str]:
        """Return the names of the parameters of which this rank holds a piece of the state: of all, nearly."""
        return list(self._master_weights.weights)

    def _pieces(self) -> list[Any]:
        zero = self._master_weights.zero
        stage_3 = getattr(zero, "fp32_partitioned_groups_flat", None)
        return list(zero.single_partition_of_fp32_groups if stage_3 is None else stage_3)

    @torch.no_grad()
    def parameters(self, names: Iterable[str], keep: Keep) -> dict[str, Any]:
        """Encode the state of the named parameters, other names on every rank; all help to put every one together."""
        names = set(names) & self._master_weights.weights.keys()
        piece = self._pieces()[0]
        state = self._optimizer.state.get(piece, {})
        self._master_weights.link()
        parameters: dict[str, Any] = {name: {} for name in names}
        for name, weight in self._master_weights.weights.items():
            for key, value in state.items():
                cut = isinstance(value, torch.Tensor) and value.shape == piece.shape
                full = self._master_weights.full_tensor(weight, key) if cut else value
                if name in names:
                    if key == _STEP and not isinstance(full, torch.Tensor):
                        full = torch.tensor(float(full))  # a number in DeepSpeed's own optimizers, no tensor
                    full = full.cpu() if isinstance(full, torch.Tensor) else full
                    parameters[name][key] = encode(full, f"{name}/{key}", keep)
        return parameters

    @torch.no_grad()
    def load(
        self,
        states: Mapping[str, Mapping[str, Any]],
        groups: list[dict[str, Any]],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> None:
        """Take encoded states and groups back; this rank keeps its pieces."""
        check_groups(groups, self._optimizer)
        complete = {
            key for state in states.values() for key, value in state.items() if key != _STEP and _is_tensor(value)
        }
        self._make_room(next((state for state in states.values() if state), {}), complete)
        kept: dict[str, Tensor] = {}
        for path, tensor in tensors:
            name, _, key = path.partition("/")
            if key in complete and name in self._master_weights.weights:
                self._master_weights.put(name, tensor, key)
            else:
                kept[path] = tensor.clone()
        if kept_step := next((value for path, value in kept.items() if path.endswith(f"/{_STEP}")), None):
            for piece in self._pieces():
                self._set_step(piece, kept_step)
        self.load_groups(groups, kept.__getitem__)

    def _make_room(self, like: Mapping[str, Any], complete: set[str]) -> None:
        """Make the state that an optimizer makes in its first update, empty, and let DeepSpeed know its pieces."""
        optimizer = self._optimizer
        optimizer.state.clear()
        for piece in self._pieces():
            for key, value in like.items():
                if key in complete:
                    optimizer.state[piece][key] = torch.zeros_like(piece, requires_grad=False)
                elif not _is_tensor(value):
                    optimizer.state[piece][key] = decode(value, _no_tensor)
        self._master_weights.link()

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
            _SCALER_POSITION: [scaler.cur_iter, scaler.last_overflow_iter],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a scaler was."""
        scaler = self._scaler
        scaler.cur_scale = float(state["scale"])
        scaler.cur_iter, scaler.last_overflow_iter = state.get(_SCALER_POSITION, (int(state["_growth_tracker"]), -1))
