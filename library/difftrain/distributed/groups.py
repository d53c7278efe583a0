"""Groups of ranks: those that have the parts of one model, and the grid of a pipeline's stages and their replicas."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from difftrain.distributed.ranks import DEFAULT_TIMEOUT_MIN

if TYPE_CHECKING:
    from torch import Tensor


class RankGroup:
    """Ranks that have the parts of one model, by their process group; None: all there are."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def all_reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """Reduce over the group, also what lies on the host, for which a device's group has no way."""
        moved = tensor.to(self.device)
        dist.all_reduce(moved, op, group=self.group)
        return moved.to(tensor.device)

    def norm(self, own: Tensor | None, device: torch.device) -> Tensor:
        """Return the norm of what all ranks have, from the norms of their shares; None: of nothing."""
        by_rank = torch.zeros(self.size, device=device)
        if own is not None:
            by_rank[self.rank] = own
        return torch.linalg.vector_norm(self.all_reduce(by_rank))


@dataclass(frozen=True)
class Grid:
    """This rank's place among stages and replicas: stage s of replica d is rank s * dp_size + d, so neighbours are replicas.

    pp: the group of this replica's stages, pp_host: the same on the host; dp: of this stage's replicas, None of one.
    """

    stage: int
    stages: int
    dp_rank: int
    dp_size: int
    pp: Any
    pp_host: Any
    dp: Any

    @classmethod
    def open(cls, stages: int, rank: int, world: int, timeout_min: float | None) -> Grid:
        """Make the groups: all ranks make all of them, in one order."""
        dp_size = world // stages
        timeout = timedelta(minutes=timeout_min or DEFAULT_TIMEOUT_MIN)

        def made(members: list[list[int]], backend: str | None = None) -> Any:
            groups = [dist.new_group(ranks, timeout=timeout, backend=backend) for ranks in members]
            return next(group for group, ranks in zip(groups, members) if rank in ranks)

        pipelines = [[stage * dp_size + replica for stage in range(stages)] for replica in range(dp_size)]
        replicas = [[stage * dp_size + replica for replica in range(dp_size)] for stage in range(stages)]
        pp, pp_host = made(pipelines), made(pipelines, "gloo")
        stage, dp_rank = divmod(rank, dp_size)
        return cls(stage, stages, dp_rank, dp_size, pp, pp_host, made(replicas) if dp_size > 1 else None)

    @property
    def leads(self) -> bool:
        """Tell whether this rank has what enters the pipeline."""
        return self.stage == 0

    @property
    def ends(self) -> bool:
        """Tell whether this rank has what leaves it."""
        return self.stage == self.stages - 1
