"""`difftrain watch [RUN | FOLDER]`: a page of the runs in a folder, served on this machine until it is stopped."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from difftrain.cli.words import asks_for_help, positional
from difftrain.config.door import guard, print_notes
from difftrain.config.parse_flags import scan
from difftrain.config.paths import expanded
from difftrain.config.render.help import entries
from difftrain.config.schema.names import did_you_mean
from difftrain.config.secrets import hide_in_command_line
from difftrain.config.spellings.row import Row
from difftrain.contracts.errors import ConfigFault, Fault

if TYPE_CHECKING:
    from difftrain.watch.server import WatchServer

PROG = "difftrain watch"
HOST, PORT, PORTS_TRIED = "127.0.0.1", 8420, 20
TOKEN_VARIABLE = "DIFFTRAIN_WATCH_TOKEN"
FLAGS: dict[str, Row] = {
    "port": Row("port", "int", "", f"port to serve on; 0: any; unset: the first free one from {PORT} on"),
    "host": Row("host", "str", "", f"address to serve on; unset: {HOST}, reachable from this machine only"),
    "token": Row(
        "token", "str", "", f"token the address must contain; unset: ${TOKEN_VARIABLE}, else a new one at every start"
    ),
}
USAGE = f"""usage: {PROG} [RUN | FOLDER] [--port=N] [--host=ADDRESS] [--token=TEXT]

Serve a page of the runs in a folder (unset: this one) or up to six folders below it: state, progress, time left, newest
samples, log, report, and buttons that save, sample and stop. The printed address contains a token; without it
nothing is shown. Ctrl-C stops the server. docs/watch.md says more.

"""


def main(argv: list[str]) -> int:
    """Serve; return the exit code."""
    if asks_for_help(argv):
        print(USAGE + entries(FLAGS.values()))
        return 0
    return guard(PROG, lambda: serve(*read(argv)))


def read(argv: list[str]) -> tuple[Path, str, int | None, str]:
    """Return folder, host, port (unset: None) and token. Raises: ConfigFault with every fault."""
    words, remaining = positional(argv, FLAGS)
    scanned = scan(remaining, FLAGS)
    values = {name: texts[-1] for name, texts in scanned.words.items()}
    faults = [*scanned.faults, *(Fault(repr(word), f"is an unexpected argument of {PROG}") for word in words[1:])]

    folder = Path(expanded(words[0] if words else ".")).absolute()
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "there is no such folder"
        beside = [path.name for path in folder.parent.iterdir() if path.is_dir()] if folder.parent.is_dir() else []
        remedy = did_you_mean(folder.name, beside) or "give the folder of a run, or one that holds runs"
        faults.append(Fault(repr(words[0] if words else "."), what, remedy))

    port = None
    if "port" in values:
        word = values["port"].strip()
        port = int(word) if word.isascii() and word.isdecimal() else -1
        if not 0 <= port < 1 << 16:
            faults.append(Fault("--port", f"must be a number from 0 to 65535, got {values['port']!r}"))

    token = values.get("token", os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24))
    hide_in_command_line(token)
    if not token.strip():
        faults.append(Fault("--token", "is empty", "leave it out: each start makes a new one"))
    host = values.get("host", HOST).strip()
    if not host:
        faults.append(Fault("--host", "is empty", f"leave it out for {HOST}"))
    if faults:
        raise ConfigFault(faults)
    print_notes(PROG, scanned.notes)
    return folder, host, port, token


def serve(folder: Path, host: str, port: int | None, token: str) -> int:
    """Serve until Ctrl-C or a SIGTERM, which both end it well."""
    from difftrain.watch.runs import DEPTH, find_runs

    server = open_server(folder, host, port, token)
    log = logging.getLogger("difftrain")
    log.addHandler(logging.StreamHandler(sys.stdout))
    log.setLevel("INFO")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    count = len(find_runs(folder))
    sought = f"{count} run{'s'[: count != 1]} in {folder}"
    sought += (
        f" or up to {DEPTH} folders below it yet; each is shown as soon as it writes its first file"
        if not count
        else ""
    )
    try:  # from the first word on: who reads the address may stop it at once
        print(f"{sought}; open\n  {server.url}\nCtrl-C stops the server; runs continue", flush=True)
        if host not in (HOST, "localhost", "::1"):
            print(
                f"{PROG}: anyone who can reach {host} and knows the token can stop runs; nothing is encrypted",
                file=sys.stderr,
            )
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        print("no longer served", flush=True)
    finally:
        server.server_close()
    return 0


def open_server(folder: Path, host: str, port: int | None, token: str) -> WatchServer:
    """Return the server at its address. Raises: ConfigFault where the address cannot be had."""
    from difftrain.watch.server import WatchServer

    for number in [port] if port is not None else [*range(PORT, PORT + PORTS_TRIED), 0]:
        try:
            return WatchServer(folder, host, number, token)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                fault = Fault(f"--port={number}", "is in use by another program", "give another one, or leave it out")
            elif error.errno == errno.EACCES:
                fault = Fault(f"--port={number}", "is not allowed for this user", "give one of at least 1024")
            else:
                what = f"this machine cannot listen there: {error.strerror or error}"
                fault = Fault(f"--host={host}", what, f"{HOST} for this machine only, 0.0.0.0 for all its networks")
            raise ConfigFault([fault]) from error
    raise AssertionError("port 0 is never in use")
