"""What a command says where its output cannot be written: a full disk, a folder that is closed or cannot be made."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from difftrain.contracts.errors import DifftrainError

_OF_A_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


@contextmanager
def writing(*outputs: Path) -> Iterator[None]:
    """Turn an error of a disk, or one beside these files or above them, into a sentence; others are not its business.

    Raises: DifftrainError.
    """
    try:
        yield
    except OSError as error:
        at = Path(error.filename or outputs[0]).absolute()
        above = {folder for output in outputs for folder in output.absolute().parents}
        beside = at.parent in {output.absolute().parent for output in outputs}
        if error.errno not in _OF_A_DISK and at not in above and not beside:
            raise
        why = "it is a file, not a folder" if at in above and at.is_file() else error.strerror
        raise DifftrainError(f"{error.filename or outputs[0]} cannot be written: {why}") from error
