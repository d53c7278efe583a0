"""What a run tells its ranks before they meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from difftrain.config.parse_flags import parse
from difftrain.distributed.ranks import Ranks
from difftrain.train.run import run


class Met(Exception):
    """Where the ranks would meet."""


@pytest.mark.flags("ddp_timeout")
@pytest.mark.parametrize(("flags", "minutes"), [([], None), (["--ddp_timeout=7"], 7)])
def test_the_timeout_of_the_ranks_is_the_flags(flags, minutes, monkeypatch, tmp_path: Path):
    asked = []

    def meet(launch, device, timeout_min=None):
        asked.append(timeout_min)
        raise Met

    monkeypatch.setattr(Ranks, "open", meet)
    (tmp_path / "data").mkdir()
    line = ["--init_from_config=tiny", f"--train_data_dir={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(Met):
        run(parse([*line, "--resolution=64,64", *flags]).config, [])
    assert asked == [minutes]
