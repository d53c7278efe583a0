"""`difftrain report RUN_DIR`: report.html anew, from the files that a run left."""

from __future__ import annotations

from difftrain.cli.words import exactly, run_folder
from difftrain.config.door import guard


def main(argv: list[str]) -> int:
    """Build the page and name it."""

    def work() -> int:
        (folder,) = exactly("report", argv, "RUN_DIR")
        from difftrain.report.html import build_html
        from difftrain.report.report import REPORT

        print(build_html(run_folder(folder, REPORT)))
        return 0

    return guard("difftrain report", work)
