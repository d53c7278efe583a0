"""Weights under ZeRO: the exact value of a parameter lies in pieces on the ranks, and is put together when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from difftrain.engine.masters import Masters

if TYPE_CHECKING:
    from torch import Tensor, nn


class ZeroMasters(Masters):
    """Put weights and their state together, and take them apart. Collective: value, stored, chosen, lend; every rank takes all.

    DeepSpeed's engine owns gradients and updates.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], root: nn.Module, stage: int) -> None:
        super().__init__(weights)
        self._stage = stage
        self._parameters = dict(root.named_parameters(remove_duplicate=False))
        self._arrived: set[str] = set()
        self._hooks = [each.register_post_accumulate_grad_hook(self._note(name)) for name, each in weights.items()]
        self.zero: Any = None

    def _note(self, name: str) -> Callable[[Any], None]:
        return lambda _: self._arrived.add(name)

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

    def without_gradient(self) -> list[str]:
        """Name the weights that no backward has reached; asked once, after the first step."""
        while self._hooks:
            self._hooks.pop().remove()
        return [name for name in self.weights if name not in self._arrived]

    # ------------------------------------------------------------------ values

    def value(self, name: str) -> Tensor:
        """Return the exact value: the weight itself where it is whole and no other is kept, else a copy."""
        weight = self.weights[name]
        if self._stage < 3 and weight.dtype == torch.float32:
            return weight.detach()
        return self.whole(weight)

    @torch.no_grad()
    def whole(self, weight: nn.Parameter, key: str | None = None) -> Tensor:
        """Put a weight's exact value together, or with a key one of its states; fp32."""
        if self._stage == 3:
            return self.zero.get_full_hp_param(weight, key).float()
        return weight.get_full_hp_param(key)  # type: ignore[attr-defined]

    @torch.no_grad()
    def put(self, name: str, value: Tensor, key: str | None = None) -> None:
        """Keep this rank's piece of a value, or of a state. For a value, `taken` brings it to the weights."""
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
    def taken(self) -> None:
        """Make the weights that the model computes with of the exact values."""
        zero = self.zero
        if self._stage < 3:
            zero.update_lp_params()
            return
        if zero.persistent_parameters:  # small ones are whole on every rank between steps
            zero.persistent_parameters[0].partition(zero.persistent_parameters)
        for place in range(len(zero.fp16_groups)):
            zero._reassign_or_swap_out_partitioned_parameters(place)
        zero.checkpoint_event_epilogue()

    @torch.no_grad()
    def lend(self, weights: Mapping[str, Tensor]) -> None:
        """Let the model of stage 3 compute with other weights, until `taken` makes its own of the exact values again."""
        from deepspeed import zero

        for name, value in weights.items():
            with zero.GatheredParameters([self.weights[name]], modifier_rank=0):
                self.weights[name].copy_(value)

    # ------------------------------------------------------------------ weights of the whole model

    def _is_cut(self, name: str) -> bool:
        return self._stage == 3 and name in self._parameters

    @torch.no_grad()
    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return a weight as the model computes with it."""
        if not self._is_cut(name):
            return tensor
        from deepspeed import zero

        with zero.GatheredParameters([self._parameters[name]]):
            return self._parameters[name].detach().clone()

    def shapes(self, model: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the model's weights, whole."""
        cut = {name: each.ds_shape for name, each in self._parameters.items() if self._is_cut(name)}  # type: ignore[attr-defined]
        return super().shapes(model) | {name: tuple(shape) for name, shape in cut.items()}

    def chosen(self, names: set[str], model: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield what a checkpoint holds of some weights; every rank helps to put every one together."""
        for name in sorted(model):
            value = self.value(name) if name in self.weights else self.stored(name, model[name])
            if name in names:
                yield name, value

    @torch.no_grad()
    def take(self, name: str, value: Tensor, place: Tensor) -> None:
        """Take a weight from a checkpoint."""
        if name in self.weights or not self._is_cut(name):
            super().take(name, value, place)
            return
        from deepspeed import zero

        with zero.GatheredParameters([self._parameters[name]], modifier_rank=0):
            self._parameters[name].copy_(value)
