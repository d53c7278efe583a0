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
    hub_id = None if hub_ids.lies_here(text) else hub_ids.read(text)
    if hub_id is None:
        return on_disk.identify(text)
    from difftrain.hub import client
    from difftrain.hub.modelscope import ModelScopeRepository
    from difftrain.hub.repository import NotFetched, Repository

    try:
        hub = ModelScopeRepository if hub_id.hub else Repository
        repository = hub.find(hub_id.repo, hub_id.kind or "model", hub_id.revision, offline=client.is_offline())
        files = repository.files(offline=client.is_offline())
        prefix = f"{hub_id.path}/" if hub_id.path else ""
        parts = {row.denoiser for row in FAMILIES.values()}
        needed = [
            prefix + name
            for name in (on_disk.INDEX, on_disk.SCHEDULER, *(f"{part}/config.json" for part in sorted(parts)))
        ]
        present = [name for name in needed if name in files]
        folder = repository.fetch(present, sum(files[name] for name in present)) if present else None
    except NotFetched as error:
        trouble = error.trouble
        return WeightsIdentity(
            faults=((f"{text}, which is not a local path: {trouble.what}", trouble.remedy or _WEIGHTS),)
        )

    def read(name: str) -> Mapping[str, Any] | None:
        path = folder / prefix / name if folder is not None else None
        if path is None or not path.is_file():
            return None
        return read_json_object(path)

    return on_disk.of_folder(read)
