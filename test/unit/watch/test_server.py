"""The page of runs over HTTP: who is shown what, and which requests leave a control file."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit

import pytest
from watched import line, older, run_folder

from difftrain.watch.server import WatchServer

TOKEN = "a token & more"
EVIL = "evil.example"
HOSTILE = '"><img src=x onerror=alert(1)>'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    run_folder(tmp_path / "runs" / "one")
    run_folder(tmp_path / "runs" / HOSTILE)
    return tmp_path / "runs"


@pytest.fixture
def server(root: Path) -> Iterator[WatchServer]:
    watched = WatchServer(root, "127.0.0.1", 0, TOKEN)
    watched.start()
    yield watched
    watched.shutdown()
    watched.server_close()


def request(
    server: WatchServer, method: str, path: str, body: str | None = None, **headers: str
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, sent)
    answer = connection.getresponse()
    text = answer.read().decode("utf-8", "replace")
    connection.close()
    return answer, text


def get(server: WatchServer, path: str, token: str | None = TOKEN, **query: str) -> tuple[int, str]:
    given = query | ({"token": token} if token is not None else {})
    answer, text = request(server, "GET", f"{path}?{urlencode(given)}")
    return answer.status, text


def do(server: WatchServer, name: str = "one", action: str = "save", token: str = TOKEN, **headers: str) -> int:
    form = urlencode({"name": name, "action": action, "token": token})
    return request(server, "POST", "/do", form, **headers)[0].status


def test_runs_are_listed_with_state_and_progress(server: WatchServer) -> None:
    status, text = get(server, "/")
    assert status == 200 and "30 of 100" in text and text.count(">running<") == 2
    assert HOSTILE not in text and HOSTILE in unescape(text)


def test_a_run_has_its_figures_log_samples_and_buttons(server: WatchServer) -> None:
    status, text = get(server, "/run", name="one")
    assert status == 200 and "30 of 100" in text and "step=30" in text and "grid_000030.png" in text
    assert "<script>document" not in text and "\x1b" not in text
    assert re.findall(r'value="(save|sample|stop)"', text) == ["save", "sample", "stop"]
    for address in re.findall(r'(?:src|href)="(/[^"]+)"', text):
        assert request(server, "GET", unescape(address))[0].status == 200


@pytest.mark.parametrize("path", ["/", "/run", "/sample", "/report", "/run?name=one&token=", "/?token=A token"])
def test_without_the_token_nothing_is_shown(server: WatchServer, path: str) -> None:
    answer, text = request(server, "GET", quote(path, safe="/?=&"))
    assert answer.status == 403 and 'name="token"' in text
    assert "of 100" not in text and "name=one" not in text and "<svg" not in text
    assert do(server, token="") == do(server, token=TOKEN[:-1]) == 403


def test_a_script_may_give_the_token_in_a_header(server: WatchServer) -> None:
    assert request(server, "GET", "/", Authorization=f"Bearer {TOKEN}")[0].status == 200
    assert request(server, "GET", "/", Authorization=f"Basic {TOKEN}")[0].status == 403


def test_a_foreign_name_that_points_here_is_refused(server: WatchServer) -> None:
    page = f"/?{urlencode({'token': TOKEN})}"
    for host in (EVIL, f"{EVIL}:80", f"localhost.{EVIL}", "[", "", f"127.0.0.1.{EVIL}"):
        assert request(server, "GET", page, Host=host)[0].status == 403, host
    for host in ("localhost", "127.0.0.1:1", "[::1]:8420", "LOCALHOST:7", socket.gethostname()):
        assert request(server, "GET", page, Host=host)[0].status == 200, host


def test_an_action_leaves_its_control_file_and_shows_the_run(server: WatchServer, root: Path) -> None:
    answer, _ = request(server, "POST", "/do", urlencode({"name": "one", "action": "stop", "token": TOKEN}))
    assert answer.status == 303
    back = urlsplit(answer.getheader("Location") or "")
    assert back.path == "/run" and parse_qs(back.query) == {"name": ["one"], "token": [TOKEN], "asked": ["stop"]}
    assert (root / "one" / "save_quit").is_file()
    assert do(server, action="sample") == do(server, action="save") == do(server, action="save") == 303
    assert (root / "one" / "save").is_file() and (root / "one" / "sample_now").is_file(), "sample/ has the pictures"


def test_an_action_needs_a_page_of_this_server(server: WatchServer, root: Path) -> None:
    own = f"127.0.0.1:{server.server_port}"
    assert do(server, Origin=f"http://{EVIL}") == do(server, Origin="null") == 403
    assert do(server, Sec_Fetch_Site="cross-site") == do(server, Sec_Fetch_Site="same-site") == 403
    assert (
        request(server, "GET", f"/do?{urlencode({'name': 'one', 'action': 'save', 'token': TOKEN})}")[0].status == 404
    )
    assert not (root / "one" / "save").exists()
    assert do(server, Origin=f"http://{own}", Sec_Fetch_Site="same-origin") == 303


def test_an_action_needs_a_run_that_goes_on(server: WatchServer, root: Path) -> None:
    run_folder(root / "over", outcome="finished")
    assert do(server, "over") == 409
    assert do(server, action="rm") == 400
    assert do(server, "..") == do(server, "../runs/one") == do(server, str(root / "one")) == do(server, "") == 404
    assert not any(path.name.startswith("save") for path in root.rglob("*"))


@pytest.mark.parametrize("naming", ["kohya", "diffusers"])
def test_a_run_under_other_names_has_buttons_too(server: WatchServer, root: Path, naming: str) -> None:
    run_folder(root / naming, naming=naming)
    assert re.findall(r'value="(save|sample|stop)"', get(server, "/run", name=naming)[1]) == ["save", "sample", "stop"]
    assert do(server, naming) == 303 and (root / naming / "save").is_file()


def test_what_is_got_may_be_asked_for_without_its_body(server: WatchServer) -> None:
    page = f"/run?{urlencode({'name': 'one', 'token': TOKEN})}"
    answer, text = request(server, "HEAD", page)
    assert answer.status == 200 and text == "" and int(answer.getheader("Content-Length") or 0) > 1000
    assert request(server, "HEAD", "/run?name=one")[0].status == 403 and request(server, "HEAD", "/x")[0].status == 404


def test_a_run_that_is_watched_itself_has_its_name(root: Path) -> None:
    watched = WatchServer(root / "one", "127.0.0.1", 0, TOKEN)
    watched.start()
    listed, text = get(watched, "/")[1], get(watched, "/run", name=".")[1]
    watched.shutdown()
    watched.server_close()
    assert ">one</a>" in listed and "<title>one</title>" in text


def test_the_report_of_a_killed_run_says_so(server: WatchServer, root: Path) -> None:
    """Its own page was written while it ran, and is not old."""
    run = run_folder(root / "gone", alive=False)
    (run / "report.json").write_text(json.dumps({"status": "running", "steps": 20, "sessions": []}))
    (run / "report.html").write_text("<title>still running</title>")
    text = get(server, "/report", name="gone")[1]
    assert '<span class="badge bad">killed</span>' in text and "at step 30 of 100" in text
    assert get(server, "/report", name="gone")[1] == text


def test_no_path_leads_out_of_the_runs(server: WatchServer, root: Path) -> None:
    (root.parent / "secret.png").write_bytes((root / "one" / "sample" / "grid_000030.png").read_bytes())
    for name in ("..", "one/..", ".", "/", "one/sample", "one\0"):
        assert get(server, "/run", name=name)[0] == 404, name
    assert get(server, "/sample", name="one", file="../../../secret.png")[0] == 404
    for path in ("/../secret.png", f"//{EVIL}/", "/%2e%2e/secret.png", "/run/one"):
        assert request(server, "GET", path)[0].status == 404, path


def test_forms_that_are_none(server: WatchServer) -> None:
    assert request(server, "POST", "/do", "x" * 5000)[0].status == 413
    assert request(server, "POST", "/do", "\xff" * 4)[0].status == 400
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.putrequest("POST", "/do")
    connection.putheader("Content-Length", "-1")
    connection.endheaders()
    assert connection.getresponse().status == 411
    connection.close()


def test_the_report_is_shown_in_a_sandbox_by_a_key_of_its_own(server: WatchServer, root: Path) -> None:
    """Who reads the address of a report, its own script perhaps, can open nothing else with it."""
    page = root / "one" / "report.html"
    page.write_text("<title>mine</title>")
    key = server.report_key("one")
    answer, text = request(server, "GET", f"/report?{urlencode({'name': 'one', 'key': key})}")
    assert answer.status == 200 and text == "<title>mine</title>"
    assert (answer.getheader("Content-Security-Policy") or "").startswith("sandbox allow-scripts;")
    assert get(server, "/run", token=None, name="one", key=key)[0] == 403
    assert get(server, "/report", token=None, name=HOSTILE, key=key)[0] == 403
    assert get(server, "/", token=key)[0] == 403


def test_a_report_that_is_old_is_made_anew_and_the_run_keeps_its_file(server: WatchServer, root: Path) -> None:
    page, metrics = root / "one" / "report.html", root / "one" / "metrics.jsonl"
    assert "<svg" in get(server, "/report", name="one")[1] and not page.exists()
    page.write_text("<title>old</title>")
    older(page, 100)
    assert "<svg" in get(server, "/report", name="one")[1] and page.read_text() == "<title>old</title>"
    older(metrics, 90)
    assert get(server, "/report", name="one")[1] == "<title>old</title>"
    page.unlink()
    page.symlink_to("/etc/passwd")
    assert "root:" not in get(server, "/report", name="one")[1]


def test_headers_that_browsers_are_held_by(server: WatchServer) -> None:
    for path in ("/", "/run", "/none"):
        answer, _ = request(server, "GET", f"{path}?{urlencode({'name': 'one', 'token': TOKEN})}")
        policy = answer.getheader("Content-Security-Policy") or ""
        assert policy.startswith("default-src 'none'") and "form-action 'self'" in policy
        assert (
            answer.getheader("X-Content-Type-Options") == "nosniff" and answer.getheader("Cache-Control") == "no-store"
        )
        assert answer.getheader("Referrer-Policy") == "same-origin"


def test_a_folder_without_runs_and_one_that_goes_away(server: WatchServer, root: Path) -> None:
    root.rename(root.parent / "away")
    status, text = get(server, "/")
    assert status == 200 and str(root) in text and "6 folders" in text
    assert get(server, "/run", name="one")[0] == 404


def test_a_run_that_is_being_written(server: WatchServer, root: Path) -> None:
    with (root / "one" / "metrics.jsonl").open("a") as file:
        file.write(line(31) + line(32)[:20])
    (root / "one" / "sessions.json").write_text(json.dumps({"sessions": []})[:9])
    status, text = get(server, "/run", name="one")
    assert status == 200 and "31 of 100" in text
