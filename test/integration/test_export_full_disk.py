"""A full disk while weights are exported: an OSError in every layout, and nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import warm

LAYOUTS = ("safetensors", "ckpt", "diffusers", "diffusers_safetensors")

ON_A_FULL_DISK = """
import errno, resource, sys
from pathlib import Path
from sdxl import config, loaded
import difftrain.models.export  # else its bytecode is cut at the limit

family, parts = loaded(config())
folder = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
for layout in sys.argv[3:]:
    try:
        family.export([], parts, layout, folder / layout)
    except OSError as error:
        print(layout, errno.errorcode[error.errno])
"""


def test_a_full_disk_is_an_os_error_in_every_layout_and_leaves_nothing(tmp_path: Path) -> None:
    """In a process of its own: a file that torch's C++ cannot end would take this one down."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path), "30000", *LAYOUTS]
    done = warm.completed(argv, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines() == [f"{layout} EFBIG" for layout in LAYOUTS]
    assert list(tmp_path.iterdir()) == []
