"""`difftrain report RUN_DIR`: report.html anew, from the files that a run left."""

from __future__ import annotations

from difftrain.cli.words import asks_for_help, exactly, run_folder
from difftrain.config.door import guard


def main(argv: list[str]) -> int:
    """Build the page and name it."""

    if asks_for_help(argv):
        print("usage: difftrain report RUN_DIR\n\nBuild report.html anew from the files that a run left, and name it.")
        return 0

    def work() -> int:
        (folder,) = exactly("report", argv, "RUN_DIR")
        from difftrain.report.report import REPORT
        from difftrain.report.run_page import build_html

        print(build_html(run_folder(folder, REPORT)))
        return 0

    return guard("difftrain report", work)
