"""The packages of a wheel, which pyproject.toml cannot list: those below library/, the patches and the recipes."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages("library", include=["difftrain*"]),
        *(f"difftrain.{name}" for name in find_packages(".", include=["third_patch*"])),
        "difftrain.recipes",
    ]
)
