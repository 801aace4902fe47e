"""The two downloads, against a hub of our own on this machine, and what is said when there is none."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from evaluation.errors import MachineError
from evaluation.problems.download import MBPP_REPOSITORY, MBPP_REVISION
from evaluation.problems.mbpp import load_mbpp, load_mbpp_plus
from evaluation.splits import CANONICAL_TEST

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs the local copies of MBPP and MBPP+")

PARTS = {"train": range(601, 975), "test": CANONICAL_TEST, "validation": range(511, 601), "prompt": range(1, 11)}


def hub_files() -> dict[str, bytes]:
    """Return the repository's files as the hub has them: a card that lists one parquet file a split."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [json.loads(line) for line in (DATA / "mbpp.jsonl").read_text().splitlines()]
    texts = pyarrow.list_(pyarrow.string())
    schema = pyarrow.schema(
        [("task_id", pyarrow.int32())]
        + [(k, pyarrow.string()) for k in ("text", "code", "test_setup_code")]
        + [(k, texts) for k in ("test_list", "challenge_test_list")]
    )
    files, listing = {}, ""
    for part, ids in PARTS.items():
        table = pyarrow.Table.from_pylist([r for r in rows if r["task_id"] in ids], schema=schema)
        buffer = io.BytesIO()
        parquet.write_table(table, buffer)
        files[f"full/{part}-00000-of-00001.parquet"] = buffer.getvalue()
        listing += f"  - split: {part}\n    path: full/{part}-*\n"
    card = f"---\nconfigs:\n- config_name: full\n  data_files:\n{listing}  default: true\n---\n"
    return {"README.md": card.encode(), **files}


@pytest.fixture
def hub():
    files = hub_files()
    api = f"/api/datasets/{MBPP_REPOSITORY}"
    entries = [{"type": "file", "oid": "0" * 40, "size": len(b), "path": p} for p, b in files.items()]

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: bytes, etag: str = '"e"') -> None:
            self.send_response(200)
            for key, value in (
                ("Content-Length", str(len(body))),
                ("ETag", etag),
                ("X-Repo-Commit", MBPP_REVISION),
                ("Content-Type", "application/json"),
            ):
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            prefix = f"/datasets/{MBPP_REPOSITORY}/resolve/{MBPP_REVISION}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                name = path.removeprefix(prefix)
                self.answer(files[name], f'"{list(files).index(name)}"')
            elif path.startswith(f"{api}/tree/"):
                below = path.split(MBPP_REVISION, 1)[1].strip("/")
                found = [e for e in entries if str(Path(e["path"]).parent) == (below or ".")]
                found += [] if below else [{"type": "directory", "oid": "1" * 40, "size": 0, "path": "full"}]
                self.answer(json.dumps(found).encode())
            elif path.startswith(f"{api}/paths-info/"):
                self.answer(json.dumps(entries).encode())
            elif path in (api, f"{api}/revision/{MBPP_REVISION}"):
                siblings = [{"rfilename": p} for p in files]
                self.answer(json.dumps({"id": MBPP_REPOSITORY, "sha": MBPP_REVISION, "siblings": siblings}).encode())
            else:
                self.send_error(404)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.command = "GET"
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@needs_data
def test_mbpp_comes_from_the_pinned_commit_of_the_hub(monkeypatch, tmp_path, hub):
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = load_mbpp(None)
    assert found.problems == load_mbpp(str(DATA / "mbpp.jsonl")).problems
    assert found.revision == MBPP_REVISION
    # Without the hub, the cache serves.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert load_mbpp(None) == found


@needs_data
def test_mbpp_plus_comes_through_evalplus(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("MBPP_OVERRIDE_PATH", str(DATA / "MbppPlus-v0.2.0.jsonl"))
    found = load_mbpp_plus(None)
    assert found.problems == load_mbpp_plus(str(DATA / "MbppPlus-v0.2.0.jsonl")).problems
    assert found.revision.startswith("v0.2.0 c24de0a0")


@pytest.mark.parametrize(("load", "flag"), [(load_mbpp, "--mbpp FILE"), (load_mbpp_plus, "--mbpp-plus FILE")])
def test_without_a_network_the_flag_is_named(monkeypatch, tmp_path, load, flag):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(MachineError, match=flag) as error:
        load(None)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)
