"""What several ranks do with a hub, in processes of their own."""

from __future__ import annotations

import json


def fetch_together() -> None:
    """Fetch on every rank, and say where it lies."""
    from difftrain.config import TrainConfig
    from difftrain.contracts import ConfigFault
    from difftrain.device import choose
    from difftrain.distributed.launch import Launch
    from difftrain.distributed.ranks import Ranks
    from difftrain.train.hub.fetch import fetch

    launch = Launch.from_environment()
    cfg = TrainConfig(model={"pretrained": "acme/tiny"}, data={"dirs": ("acme/pictures",)})
    with Ranks.open(launch, choose("cpu", launch.local_rank, launch.local_size)) as ranks:
        here, pins = fetch(cfg, ranks, {})
        try:
            fetch(TrainConfig(model={"pretrained": "acme/none"}), ranks, {})
        except ConfigFault as fault:
            said = str(fault)
    print(json.dumps([here.model.pretrained, *here.data.dirs, pins, said]))
