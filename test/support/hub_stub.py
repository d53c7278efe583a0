"""A hub on this machine: the part of the hub's HTTP interface that huggingface_hub uses, and ways to let it misbehave.

Repositories lie in memory, as a list of commits. Requests are noted. No Xet: HF_HUB_DISABLE_XET must be set.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_FROM = 2048  # bytes; the hub's limit is larger
Files = dict[str, bytes]


@dataclass
class Repo:
    """One repository. refs: branch or tag -> commit. gated: only those tokens see its files."""

    private: bool = False
    gated: bool = False
    commits: dict[str, Files] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def push(self, files: Mapping[str, bytes], message: str = "", branch: str = "main") -> str:
        """Add a commit with exactly these files."""
        seed = "".join([message, str(len(self.commits)), *(f"{name}{hash(data)}" for name, data in files.items())])
        commit = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs[branch] = commit
        self.messages.append(message)
        return commit

    @property
    def files(self) -> Files:
        """Return what lies on the main branch."""
        return self.commits[self.refs["main"]] if self.refs else {}


@dataclass
class Mischief:
    """What happens to requests instead of an answer. how: a status, "close", "stall", or "half" of the content."""

    method: str
    path: re.Pattern[str]
    how: int | str
    times: int
    headers: dict[str, str]


class HubStub:
    """The hub. tokens: token -> (user, role)."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens: dict[str, tuple[str, str]] = {"hf_writer0123456789abcdef": ("ann", "write")}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.mischiefs: list[Mischief] = []
        self.lock = threading.Lock()
        self.awake = threading.Event()  # ends stalls
        stub = self

        class Handler(_Handler):
            hub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    @property
    def token(self) -> str:
        """Return a token that may write."""
        return next(iter(self.tokens))

    def close(self) -> None:
        """Stop serving."""
        self.awake.set()
        self._server.shutdown()
        self._server.server_close()

    def repo(self, name: str, kind: str = "model") -> Repo:
        """Return a repository, made where it is missing."""
        return self.repos.setdefault((kind, name), Repo())

    def push_folder(self, name: str, folder: Path, kind: str = "model", under: str = "") -> str:
        """Commit what lies in a folder."""
        files = {
            f"{under}{path.relative_to(folder).as_posix()}": path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return self.repo(name, kind).push(files)

    def misbehave(self, method: str, path: str, how: int | str, times: int = 1, **headers: str) -> None:
        """Let the next requests that match go wrong."""
        self.mischiefs.append(Mischief(method, re.compile(path), how, times, headers))

    def asked(self, method: str, path: str) -> list[str]:
        """Return the paths of requests that match."""
        with self.lock:
            return [each for verb, each in self.requests if verb == method and re.search(path, each)]

    def environment(self, home: Path) -> dict[str, str]:
        """Return what a process needs to take this for the hub, with caches of its own."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_TOKEN": self.token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "2",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }


@contextlib.contextmanager
def serving() -> Iterator[HubStub]:
    """Run a hub for as long as the block lasts."""
    stub = HubStub()
    try:
        yield stub
    finally:
        stub.close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Keep the console clean."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def _handle(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path)
        length = int(self.headers.get("Content-Length") or 0)
        chunked = self.headers.get("Transfer-Encoding") == "chunked"
        body = self._chunks() if chunked else self.rfile.read(length)
        with self.hub.lock:
            self.hub.requests.append((self.command, path))
            mischief = next((m for m in self.hub.mischiefs if self._suits(m, path)), None)
            if mischief is not None:
                mischief.times -= 1
        self.half = False
        if mischief is not None and self._misbehave(mischief):
            return
        for pattern, action in _ROUTES:
            found = pattern.fullmatch(path)
            if found and action[0] == self.command:
                getattr(self, action[1])(body, parse_qs(parts.query), **found.groupdict())
                return
        self._refuse(404)

    def _suits(self, mischief: Mischief, path: str) -> bool:
        return mischief.times > 0 and mischief.method == self.command and bool(mischief.path.search(path))

    def _misbehave(self, mischief: Mischief) -> bool:
        """Do it; return whether the request is dealt with."""
        if mischief.how == "half":
            self.half = True
            return False
        if mischief.how == "stall":
            self.hub.awake.wait(60)
            self.close_connection = True
        elif mischief.how == "close":
            self.close_connection = True
        elif mischief.how == "slow":
            time.sleep(float(mischief.headers["seconds"]))
            return False
        else:
            self._refuse(int(mischief.how), **mischief.headers)
        return True

    def _chunks(self) -> bytes:
        data = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    # answers

    def _answer(self, status: int, data: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if self.half else data)
            if self.half:
                self.close_connection = True

    def _json(self, content: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(content).encode(), Content_Type="application/json")

    def _refuse(self, status: int, **headers: str) -> None:
        code, message = headers.get("code", ""), headers.get("message", "")
        more = {"X_Error_Code": code} if code else {}
        if message:
            more["X_Error_Message"] = message
        self._answer(status, json.dumps({"error": message}).encode(), Content_Type="application/json", **more)

    # who asks, and for what

    def _who(self) -> tuple[str, str] | None:
        """Return (user, role), or None for somebody without a token; a wrong one is refused."""
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return self.hub.tokens.get(given, ("", "wrong")) if given else None

    def _open(self, kind: str, repo: str, *, files: bool = False, write: bool = False) -> Repo | None:
        """Return a repository that the asking one may see (write: may change), else answer why not."""
        who = self._who()
        if who is not None and who[1] == "wrong":
            self._refuse(401, message="Invalid credentials in Authorization header")
            return None
        found = self.hub.repos.get((kind.removesuffix("s"), repo))
        if found is None or (found.private and who is None):
            self._refuse(404 if who else 401, code="RepoNotFound", message="Repository not found")
            return None
        if files and found.gated:
            self._refuse(403, code="GatedRepo", message="Access to it is restricted")
            return None
        if write and (who is None or who[1] != "write" or who[0] != repo.split("/")[0]):
            self._refuse(403, message="You have no write access to it")
            return None
        return found

    def _commit_of(self, repo: Repo, revision: str) -> str | None:
        commit = repo.refs.get(revision) or (revision if revision in repo.commits else None)
        if commit is None:
            self._refuse(404, code="RevisionNotFound", message=f"Invalid rev id: {revision}")
        return commit

    # routes

    def whoami(self, _body: bytes, _query: Any) -> None:
        who = self._who()
        if who is None or who[1] == "wrong":
            self._refuse(401, message="Invalid credentials in Authorization header")
            return
        self._json({"type": "user", "name": who[0], "auth": {"accessToken": {"displayName": "t", "role": who[1]}}})

    def info(self, _body: bytes, _query: Any, kind: str, repo: str, revision: str | None = None) -> None:
        found = self._open(kind, repo)
        if found is None:
            return
        commit = self._commit_of(found, revision or "main") if found.refs or revision else ""
        if commit is None:
            return
        siblings = [{"rfilename": name} for name in found.commits.get(commit, {})]
        gated = "manual" if found.gated else False
        self._json(
            {"id": repo, "sha": commit, "private": found.private, "gated": gated, "siblings": siblings, "tags": []}
        )

    def tree(self, _body: bytes, _query: Any, kind: str, repo: str, revision: str, path: str | None = None) -> None:
        found = self._open(kind, repo, files=True)
        commit = self._commit_of(found, revision) if found else None
        if found is None or commit is None:
            return
        prefix = f"{path}/" if path else ""
        files = {name: data for name, data in found.commits[commit].items() if name.startswith(prefix)}
        if path and not files:
            self._refuse(404, code="EntryNotFound", message=f"no folder {path} here")
            return
        self._json([self._entry(name, data) for name, data in files.items()])

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        if len(data) >= LFS_FROM:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def resolve(self, _body: bytes, _query: Any, repo: str, revision: str, file: str, kind: str = "models") -> None:
        found = self._open(kind or "models", repo, files=True)
        commit = self._commit_of(found, revision) if found else None
        if found is None or commit is None:
            return
        data = found.commits[commit].get(file)
        if data is None:
            self._refuse(404, code="EntryNotFound", message=f"no file {file} here")
            return
        etag = hashlib.sha256(data) if len(data) >= LFS_FROM else hashlib.sha1(data)
        more = {"ETag": f'"{etag.hexdigest()}"', "X_Repo_Commit": commit, "Accept_Ranges": "bytes"}
        begin = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if begin and self.command == "GET":
            start = int(begin[1])
            more["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            self._answer(206, data[start:], **more)
        else:
            self._answer(200, data, **more)

    def resolve_data(self, body: bytes, query: Any, repo: str, revision: str, file: str) -> None:
        self.resolve(body, query, repo, revision, file, kind="datasets")

    def create(self, body: bytes, _query: Any) -> None:
        who, asked = self._who(), json.loads(body)
        if who is None or who[1] != "write":
            self._refuse(401 if who is None or who[1] == "wrong" else 403, message="You may not create repositories")
            return
        kind, owner = asked.get("type") or "model", asked.get("organization") or who[0]
        name = f"{owner}/{asked['name']}"
        url = f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        if (kind, name) in self.hub.repos:
            self._json({"error": "You already created this repo", "url": url}, 409)
        elif owner != who[0]:
            self._refuse(403, message=f"You have no right to create a {kind} under the namespace {owner}")
        else:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            self.hub.repos[kind, name] = Repo(private=private)
            self._json({"url": url, "name": name})

    def preupload(self, body: bytes, _query: Any, kind: str, repo: str, revision: str) -> None:
        if self._open(kind, repo, write=True) is None:
            return
        files = [
            {
                "path": each["path"],
                "uploadMode": "lfs" if each["size"] >= LFS_FROM else "regular",
                "shouldIgnore": False,
            }
            for each in json.loads(body)["files"]
        ]
        self._json({"files": files})

    def batch(self, body: bytes, _query: Any, repo: str, kind: str = "models") -> None:
        if self._open(kind, repo, write=True) is None:
            return
        objects = []
        for each in json.loads(body)["objects"]:
            known = each["oid"] in self.hub.blobs
            href = f"{self.hub.endpoint}/lfs/{each['oid']}"
            objects.append({**each} if known else {**each, "actions": {"upload": {"href": href}}})
        self._json({"transfer": "basic", "objects": objects})

    def batch_data(self, body: bytes, query: Any, repo: str) -> None:
        self.batch(body, query, repo, kind="datasets")

    def blob(self, body: bytes, _query: Any, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._refuse(400, message="these bytes have another checksum")
            return
        self.hub.blobs[oid] = body
        self._answer(200)

    def commit(self, body: bytes, _query: Any, kind: str, repo: str, revision: str) -> None:
        found = self._open(kind, repo, write=True)
        if found is None:
            return
        lines = [json.loads(line) for line in body.splitlines()]
        with self.hub.lock:
            files, message = dict(found.files), ""
            for line in lines:
                value = line["value"]
                if line["key"] == "header":
                    message = value["summary"]
                elif line["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    files[value["path"]] = self.hub.blobs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del files[value["path"]]
            sha = found.push(files, message)
        self._json({"commitUrl": f"{self.hub.endpoint}/{repo}/commit/{sha}", "commitOid": sha})


_KIND, _REPO, _REVISION = r"(?P<kind>models|datasets)", r"(?P<repo>[^/]+/[^/]+?)", r"(?P<revision>refs/pr/\d+|[^/]+)"
_ROUTES = [
    (re.compile(pattern), action)
    for pattern, action in (
        (r"/api/whoami-v2", ("GET", "whoami")),
        (r"/api/repos/create", ("POST", "create")),
        (rf"/api/{_KIND}/{_REPO}", ("GET", "info")),
        (rf"/api/{_KIND}/{_REPO}/revision/{_REVISION}", ("GET", "info")),
        (rf"/api/{_KIND}/{_REPO}/tree/{_REVISION}(?:/(?P<path>.+))?", ("GET", "tree")),
        (rf"/api/{_KIND}/{_REPO}/preupload/{_REVISION}", ("POST", "preupload")),
        (rf"/api/{_KIND}/{_REPO}/commit/{_REVISION}", ("POST", "commit")),
        (rf"/datasets/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", ("GET", "resolve_data")),
        (rf"/datasets/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", ("HEAD", "resolve_data")),
        (rf"/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", ("GET", "resolve")),
        (rf"/{_REPO}/resolve/{_REVISION}/(?P<file>.+)", ("HEAD", "resolve")),
        (rf"/datasets/{_REPO}\.git/info/lfs/objects/batch", ("POST", "batch_data")),
        (rf"/{_REPO}\.git/info/lfs/objects/batch", ("POST", "batch")),
        (r"/lfs/(?P<oid>[0-9a-f]{64})", ("PUT", "blob")),
    )
]


def point_here(monkeypatch: Any, stub: HubStub, home: Path) -> None:
    """Let huggingface_hub of this very process take the stub for the hub: it has read the environment already."""
    from huggingface_hub import constants

    from difftrain.hub import client

    for name, value in stub.environment(home).items():
        monkeypatch.setenv(name, value)
    for name, value in {
        "ENDPOINT": stub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": stub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
        "HF_HUB_DOWNLOAD_TIMEOUT": 1,
        "AGENT_HARNESSES_PATH": str(home / "agents.json"),
    }.items():
        if hasattr(constants, name):
            monkeypatch.setattr(constants, name, value)
    client.api.cache_clear()
