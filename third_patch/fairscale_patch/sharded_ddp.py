"""ShardedDDP: gradients are reduced in fp16 where that is asked for, also those in buckets.

Upstream warns and reduces buckets in full precision, which are nearly all there is: a flag that does nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from fairscale.internal.params import Workhandle
from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel
from fairscale.nn.misc import GradBucket
from torch.autograd import Variable

from ..patching import Change

_HALF = torch.float16
_init, _get_reduce_fn = ShardedDataParallel.__init__, ShardedDataParallel._get_reduce_fn


@wraps(_init)
def init(self: ShardedDataParallel, *args: Any, reduce_fp16: bool = False, **kwargs: Any) -> None:
    """Wrap as upstream does; the choice of fp16 stays as it is given."""
    _init(self, *args, reduce_fp16=False, **kwargs)
    self._reduce_fp16 = reduce_fp16
    if reduce_fp16:
        logging.getLogger("difftrain").info("ShardedDDP reduces gradients in fp16")


def send(self: ShardedDataParallel, bucket: GradBucket) -> None:
    """Begin the reduction of a bucket to the rank that owns its parameters."""
    bucket.buffer.mul_(self._world_size_scaling)
    message = bucket.buffer.to(_HALF) if self._reduce_fp16 else bucket.buffer
    bucket.sent = True

    def done() -> None:
        if message is not bucket.buffer:
            bucket.buffer.copy_(message)

    work = dist.reduce(message, bucket.destination, group=self._process_group, async_op=True)
    self._work_handles.append(Workhandle(handle=work, callback=done))


def reduce_function(self: ShardedDataParallel, index: int, param: torch.Tensor, rank: int) -> Callable[..., None]:
    """Return what a gradient's arrival does. Outside of buckets upstream's; in one, the last gradient sends it."""
    if not self._use_buckets or not self._should_bucket_grad[index]:
        return _get_reduce_fn(self, index, param, rank)

    @torch.no_grad()
    def arrived(*_: Any) -> None:
        if self._should_accumulate_grads or not self._grad_to_be_reduced[index]:
            return
        assert param.grad is not None, "a gradient that has arrived is there"
        if not self._bucket_flush_callback_set:
            Variable._execution_engine.queue_callback(self._flush_reduce_calls)
            self._bucket_flush_callback_set = True
        self._grad_to_be_reduced[index] = False
        bucket = self._buckets[param.device][rank]
        bucket.params_checked_in += 1
        if bucket.all_checked_in:
            send(self, bucket)
        self._try_consume_work_handle()

    return arrived


def flush(self: ShardedDataParallel) -> None:
    """At the end of a backward, send what has not been sent, and wait for everything."""
    for bucket in self._bucket_list:
        if not bucket.sent:
            send(self, bucket)
    self._consume_work_handles()


def changes() -> Iterator[Change]:
    """Yield what is replaced."""
    yield ShardedDataParallel, "__init__", init
    yield ShardedDataParallel, "_get_reduce_fn", reduce_function
    yield ShardedDataParallel, "_flush_reduce_calls", flush
