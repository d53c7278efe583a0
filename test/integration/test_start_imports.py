"""What a start imports: describing encoders needs none of their classes, which take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIBRARY = Path(__file__).parents[2] / "library"


def test_describing_encoders_imports_no_class() -> None:
    """Sizes, counts, fingerprints and features of what may be cached, of a family on the kit."""
    code = (
        f"import sys; sys.path.insert(0, {str(LIBRARY)!r})\n"
        "from difftrain.config import TrainConfig\n"
        "from difftrain.models.registry import make_family\n"
        "family = make_family(TrainConfig.model_validate({'model': {'family': 'sd3', 'init_from_config': 'tiny'}}))\n"
        "from difftrain.contracts import Parts\n"
        "import difftrain.models.build as sizes\n"
        "complete = sizes.complete\n"
        "sizes.complete = lambda kind, given: dict(given) if 'Transformer' in kind else complete(kind, given)\n"
        "family.agree = ()\n"
        "found = {name: (each.fingerprint(), each.features) for name, each in family.encoders(Parts(None)).items()}\n"
        "counts = [family.source.count(part) for part in family.parts if part != 'transformer']\n"
        "assert len(found) == 4 and len(counts) == 4 and not {'transformers', 'diffusers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sdxls_source_imports_no_class_of_an_encoder() -> None:
    """What a start with a whole cache asks of encoders: sizes, counts, and what decides."""
    code = (
        f"import sys; sys.path[:0] = [{str(LIBRARY)!r}, {str(LIBRARY.parent / 'test' / 'support')!r}]\n"
        "from sdxl import source\n"
        "made = source()\n"
        "told = [(made.decisive(part), made.count(part)) for part in ('vae', 'text_encoder_1', 'text_encoder_2')]\n"
        "ends = ('clip.modeling_clip', 'autoencoders.autoencoder_kl')\n"
        "assert len(told) == 3 and not [name for name in sys.modules if name.endswith(ends)]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
