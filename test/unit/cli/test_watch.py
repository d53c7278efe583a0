"""difftrain watch: its command line, and a port that is taken."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path

import pytest
from refusals import is_about, names
from watched import run_folder

from difftrain.cli import watch
from difftrain.contracts import ConfigFault


def refused(*argv: str) -> list[str]:
    with pytest.raises(ConfigFault) as caught:
        watch.read(list(argv))
    return [str(fault) for fault in caught.value.faults]


def test_what_a_line_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(watch.TOKEN_VARIABLE, raising=False)
    folder, host, port, token = watch.read([])
    assert (folder, host, port) == (tmp_path, "127.0.0.1", None) and len(token) >= 32
    assert token != watch.read([])[3]
    line = [str(tmp_path), "--port", "0", "--host=0.0.0.0", "--token=T"]
    assert watch.read(line) == (tmp_path, "0.0.0.0", 0, "T")
    monkeypatch.setenv(watch.TOKEN_VARIABLE, "from outside")
    assert watch.read([])[3] == "from outside" and watch.read(["--token=T"])[3] == "T"


def test_faults_come_together(tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    found = refused(str(tmp_path / "output"), "more", "--port=seven", "--token=", "--host= ", "--prot=1")
    assert any(names(fault, "output", "outputs") for fault in found)
    for about in ("--port", "--token", "--host", "--prot", "'more'"):
        assert any(is_about(fault, about) for fault in found), about
    assert refused(str(tmp_path), "--port=65536") and refused(str(tmp_path), "--port=-1")
    file = tmp_path / "a.html"
    file.write_text("")
    assert len(refused(str(file))) == 1


def test_a_port_that_is_taken_is_named_and_without_one_the_next_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigFault) as caught:
            watch.open_server(tmp_path, "127.0.0.1", port, "T")
        assert is_about(caught.value.faults[0], f"--port={port}") or is_about(caught.value.faults[0], "--port")
        monkeypatch.setattr(watch, "PORT", port)
        with watch.open_server(tmp_path, "127.0.0.1", None, "T") as server:
            assert server.server_port != port
    with pytest.raises(ConfigFault) as caught:
        watch.open_server(tmp_path, "no such host", 0, "T")
    assert is_about(caught.value.faults[0], "--host", "no such host") or names(caught.value.faults[0], "no such host")


def test_the_address_that_is_printed_opens_the_page(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    with watch.open_server(tmp_path, "127.0.0.1", 0, "a b&c") as server:
        server.start()
        _, _, rest = server.url.partition("//")
        host, _, path = rest.partition("/")
        connection = http.client.HTTPConnection(host, timeout=10)
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        assert answer.status == 200 and b"30 of 100" in answer.read()
        connection.close()
        server.shutdown()
