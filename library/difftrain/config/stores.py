"""Object stores by their URLs: whether a package can read them, and how they are shown."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?<=://)[^/@]*:[^/@]*@")
# pip's name of what a file system of fsspec's own imports, where it is not the module's
_PIP = {"smbclient": "smbprotocol", "libarchive": "libarchive-c", "git": "GitPython"}


def shown(url: str) -> str:
    """Return a URL as it may be printed: without a user's password."""
    return _SECRET.sub("…@", url)


def why_not(url: str) -> tuple[str, str] | None:
    """Say why a URL cannot be read here, and what would help: its protocol is unknown, or a package is missing."""
    if _SECRET.search(url):
        what = f"{shown(url)!r} holds a password, which would be written down with the configuration"
        return what, "give it as fsspec or the store's own package takes it: by the environment, or a file of theirs"
    from fsspec.registry import available_protocols, get_filesystem_class, known_implementations

    for part in url.split("::"):
        protocol = part.partition("://")[0].lower()
        try:
            get_filesystem_class(protocol)
        except ValueError:
            usual = [
                name for name in ("s3", "gs", "az", "hf", "http", "https", "file") if name in available_protocols()
            ]
            return f"{shown(url)!r}: no protocol {protocol!r} is known", f"give one of {', '.join(usual)}, or a folder"
        except ImportError as error:
            package = known_implementations[protocol]["class"].partition(".")[0]
            if package == "fsspec":  # it has the file system, but not what that needs
                package = getattr(error.__cause__, "name", None) or "what fsspec's documents name"
            package = _PIP.get(package, package)
            return f"{shown(url)!r} needs the package {package}, which is not installed", f"pip install {package}"
    return None
