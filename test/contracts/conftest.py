"""The contract suite of the families: every test that takes `name` or `tiny` runs for each family on the kit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    with contextlib.suppress(ValueError):  # the golden tier has the same flag, where both are run at once
        parser.addoption(
            "--update-golden", action="store_true", help="write golden figures anew; say why in the commit"
        )


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    """Whether to write the figures instead of comparing with them."""
    return bool(request.config.getoption("--update-golden", default=False))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Sum in one order, and let pictures of progress and other people's warnings be."""
    import diffusers
    import transformers

    torch.set_num_threads(1)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(params=families.nightly_siblings(families.ON_KIT), scope="session")
def name(request: pytest.FixtureRequest) -> str:
    """Name a family on the kit."""
    return request.param


@pytest.fixture(scope="session")
def tiny(name: str) -> families.Tiny:
    """A family of the size tiny. Tests leave its weights as they are; one that trains takes `fresh`."""
    return families.trained_once(families.loaded(families.config(name)))


@pytest.fixture
def no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the fixed positions of SD3's sizes, which take seconds and gigabytes: nothing is counted of them."""
    from diffusers.models import embeddings

    def blank(width: int, side: int, **_: object) -> torch.Tensor:
        return torch.zeros(1).expand(side * side, width)

    monkeypatch.setattr(embeddings, "get_2d_sincos_pos_embed", blank)


@pytest.fixture
def fresh(name: str) -> Callable[..., families.Tiny]:
    """Load a tiny family of one's own: sections and fields of [model] as families.config takes them."""
    return lambda *sections, **model: families.loaded(families.config(name, *sections, **model))


@pytest.fixture(scope="session")
def folder(tiny: families.Tiny, name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Export the tiny family as a diffusers folder."""
    return families.exported(tiny, tmp_path_factory.mktemp(name) / "folder")
