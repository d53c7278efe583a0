"""One rank of the doctor's job: `python -m difftrain.cli.doctor.rank KIND`, in the environment of a launcher."""

from __future__ import annotations

import json
import sys
import time

from difftrain.contracts.errors import DifftrainError
from difftrain.device.choice import hold_autoload

TIMEOUT_MIN = 1.0
_ELEMENTS = 1 << 20
_LARGE = 1 << 24  # 64 MiB in fp32


def main(kind: str) -> int:
    """Meet, sum, and print what came out as one JSON line."""
    hold_autoload()
    import torch

    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks

    launch = Launch.from_environment()
    device = choose(kind, launch.local_rank, launch.local_size)
    start = time.monotonic()
    with Ranks.open(launch, device, TIMEOUT_MIN) as ranks:
        ranks.barrier()
        connected = time.monotonic() - start
        ranks_of_elements = torch.arange(_ELEMENTS) % launch.size
        sums = {}
        for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
            # element i gets its value from one rank alone: whole numbers, so the sum is exact, and a rank whose part
            # is lost is seen
            summands = torch.where(ranks_of_elements == launch.rank, ranks_of_elements + 1, 0).to(
                device.torch_device, dtype
            )
            sums[name] = bool(torch.equal(ranks.sum_(summands).cpu(), (ranks_of_elements + 1).to(dtype)))
        large = torch.ones(_LARGE, device=device.torch_device)
        ranks.sum_(large)  # the first builds its buffers
        device.synchronise()
        ranks.barrier()
        start = time.monotonic()
        ranks.sum_(large)
        device.synchronise()
        rate = large.numel() * large.element_size() / (time.monotonic() - start) / 2**30
    print(json.dumps({"sums": sums, "connect_s": round(connected, 3), "gib_s": round(rate, 3)}), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1]))
    except DifftrainError as error:
        print(str(error).strip(), file=sys.stderr)
        sys.exit(error.exit_code)
