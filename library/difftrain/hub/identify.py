"""Which family the weights of a hub's repository are of: from a few small files of it, before anything large is fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from difftrain.config import hub_ids
from difftrain.config.parse_text_to_image import WeightsIdentity
from difftrain.io.files import read_json_object
from difftrain.models.registry import FAMILIES
from difftrain.models.weights import identify as on_disk

_WEIGHTS = "give the path of a diffusers folder"


def identify(text: str) -> WeightsIdentity:
    """Say what weights are: a folder or file of this machine, else a repository."""
    found = None if hub_ids.lies_here(text) else hub_ids.read(text)
    if found is None:
        return on_disk.identify(text)
    from difftrain.hub import client
    from difftrain.hub.repository import NotFetched, Repository

    try:
        repository = Repository.find(found.repo, found.kind or "model", found.revision, offline=client.is_offline())
        files = repository.files(offline=client.is_offline())
        prefix = f"{found.path}/" if found.path else ""
        parts = {row.denoiser for row in FAMILIES.values()}
        wanted = [
            prefix + name
            for name in (on_disk.INDEX, on_disk.SCHEDULER, *(f"{part}/config.json" for part in sorted(parts)))
        ]
        there = [name for name in wanted if name in files]
        folder = repository.fetch(there, sum(files[name] for name in there)) if there else None
    except NotFetched as error:
        trouble = error.trouble
        return WeightsIdentity(faults=((f"{text}, which is no path here: {trouble.what}", trouble.remedy or _WEIGHTS),))

    def read(name: str) -> Mapping[str, Any] | None:
        path = folder / prefix / name if folder is not None else None
        if path is None or not path.is_file():
            return None
        return read_json_object(path)

    return on_disk.of_folder(read)
