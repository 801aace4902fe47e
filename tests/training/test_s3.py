"""The store on S3: a real server on loopback, and a proxy before it that breaks what passes."""

import base64
import contextlib
import hashlib
import random
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
from faulty_s3 import FAULTS, TIMEOUT_S, Endpoint, FaultyProxy, settings

import training.s3
from evaluation.errors import InputError, MachineError
from evaluation.manifests import MANIFEST, Provenance, write_manifest
from training.s3 import PART_BYTES, S3Backend
from training.store import Store, open_store

CELLS = ("a_cell", "another_cell")


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    server = Endpoint(tmp_path_factory.mktemp("s3") / "server.log")
    yield server
    server.close()


@pytest.fixture
def bucket(endpoint, monkeypatch, request):
    """A fresh bucket; AWS's own settings point at the server."""
    for name, value in settings(endpoint.url).items():
        monkeypatch.setenv(name, value)
    name = f"b-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:16]}"
    S3Backend(name).fs.mkdir(name)
    return name


def made(folder: Path, files: dict[str, bytes], cell: str = "a_cell", step: int = 30) -> Path:
    """Make a whole local folder with these files."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    write_manifest(folder, "checkpoint", Provenance(cell=cell, global_step=step, fingerprint="f" * 64))
    return folder


def stored(bucket: str) -> dict[str, bytes]:
    """Every object of the bucket, asked of the server past everything of ours."""
    fs = S3Backend(bucket).fs
    return {path.partition("/")[2]: fs.cat_file(path) for path in fs.find(f"{bucket}/")}


def local_bytes(folder: Path, rel: str) -> dict[str, bytes]:
    return {f"{rel}/{p.relative_to(folder).as_posix()}": p.read_bytes() for p in folder.rglob("*") if p.is_file()}


SMALL = {"config.json": b"{}", "empty.txt": b"", "sub/tokenizer.json": b"[]", "model.safetensors": b"weights" * 999}


@pytest.mark.parametrize("prefix", ["", "/team/run 1", "/ünder"])
def test_publish_fetch_list_and_verify(bucket, tmp_path, prefix):
    store = open_store(f"s3://{bucket}{prefix}")
    store.check_writable()
    local, rel = made(tmp_path / "f", SMALL), "a_cell/global_step_30"
    assert store.manifest(rel) is None
    assert store.numbered("a_cell", "global_step_") == []
    assert store.publish(local, rel) is True
    assert stored(bucket) == {f"{prefix}/{k}".lstrip("/"): v for k, v in local_bytes(local, rel).items()}
    assert store.publish(local, rel) is False
    assert store.publish(local, f"{rel}") is False  # nothing nests in what is there
    assert store.numbered("a_cell", "global_step_") == [30]
    assert list(store.folders()) == [rel]
    assert store.verify().ok
    assert local_bytes(store.fetch(rel, tmp_path / "back"), rel) == local_bytes(local, rel)


@pytest.mark.parametrize("size", [PART_BYTES - 1, 2 * PART_BYTES - 1, 2 * PART_BYTES, 2 * PART_BYTES + 1, 50 << 20])
def test_large_files_go_in_parts_and_are_proved_without_reading_back(bucket, tmp_path, size, monkeypatch):
    content = random.Random(size).randbytes(size)
    (tmp_path / "x").write_bytes(content)
    backend = S3Backend(bucket)
    backend.put(tmp_path / "x", "k/x")
    right = hashlib.sha256(content).hexdigest()
    assert backend.sha256("k/x") == right
    monkeypatch.setattr(backend, "sha256", lambda _: pytest.fail("read back"))
    assert backend.same(tmp_path / "x", "k/x", right)


@pytest.mark.parametrize("encrypted", [False, True])
def test_objects_in_parts_are_proved_by_the_servers_checksum_of_the_whole(bucket, tmp_path, encrypted, monkeypatch):
    content, backend = random.Random(3).randbytes(2 * PART_BYTES + 5), S3Backend(bucket)
    if encrypted:  # its ETag is no MD5 then
        rule = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "aws:kms"}}
        backend.fs.call_s3("put_bucket_encryption", Bucket=bucket, ServerSideEncryptionConfiguration={"Rules": [rule]})
    (tmp_path / "x").write_bytes(content)
    backend.put(tmp_path / "x", "x")
    head = backend._head("x", ChecksumMode="ENABLED")
    assert head["ChecksumCRC32"] == base64.b64encode(zlib.crc32(content).to_bytes(4, "big")).decode()
    assert (head.get("ServerSideEncryption") == "aws:kms") is encrypted
    monkeypatch.setattr(training.s3, "_digests", lambda *_: pytest.fail("an MD5, or read back"))
    assert backend.same(tmp_path / "x", "x", hashlib.sha256(content).hexdigest())
    (tmp_path / "x").write_bytes(content[:-1] + b"?")
    assert not backend.same(tmp_path / "x", "x", hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest())


@pytest.mark.parametrize("code", ["NotImplemented", "InvalidArgument"])
def test_a_server_that_knows_no_checksums_gets_and_proves_objects_by_their_md5(
    endpoint, bucket, tmp_path, code, monkeypatch
):
    proxy = FaultyProxy(endpoint, refused=("x-amz-checksum-type", code))
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    content, backend = random.Random(4).randbytes(2 * PART_BYTES + 5), S3Backend(bucket)
    (tmp_path / "x").write_bytes(content)
    right = hashlib.sha256(content).hexdigest()
    for key in ("x", "y"):
        backend.put(tmp_path / "x", key)
        assert "ChecksumCRC32" not in backend._head(key, ChecksumMode="ENABLED")
        with monkeypatch.context() as patch:
            patch.setattr(backend, "sha256", lambda _: pytest.fail("read back"))
            assert backend.same(tmp_path / "x", key, right)
    proxy.close()
    assert proxy.injected == {code: 1}  # asked once


def test_an_object_sent_in_other_parts_is_read_back(bucket, tmp_path):
    content = random.Random(1).randbytes(40 << 20)
    (tmp_path / "x").write_bytes(content)
    backend = S3Backend(bucket)
    backend.fs.put_file(str(tmp_path / "x"), f"{bucket}/x", chunksize=10 << 20)
    assert backend.same(tmp_path / "x", "x", hashlib.sha256(content).hexdigest())
    (tmp_path / "x").write_bytes(content[:-1] + b"?")
    assert not backend.same(tmp_path / "x", "x", hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest())


def test_nothing_is_answered_from_memory(bucket, tmp_path):  # UPLOAD-106, UPLOAD-107
    mine, theirs = S3Backend(bucket), S3Backend(bucket)
    (tmp_path / "x").write_bytes(b"12")
    assert mine.list("a") == {}
    theirs.put(tmp_path / "x", "a/x")
    assert mine.list("a") == {"x": 2}
    assert mine.read("a/x") == b"12"
    (tmp_path / "x").write_bytes(b"123456")
    theirs.put(tmp_path / "x", "a/x")
    assert (mine.list("a"), mine.read("a/x")) == ({"x": 6}, b"123456")
    theirs.remove("a/x")
    assert (mine.list("a"), mine.read("a/x"), mine.folders("")) == ({}, None, [])


def test_step_30_is_not_step_300(bucket, tmp_path):  # UPLOAD-109
    store = open_store(f"s3://{bucket}/run")
    store.publish(made(tmp_path / "f", SMALL, step=300), "a_cell/global_step_300")
    assert not store.has("a_cell/global_step_30")
    assert store.backend.list("a_cell/global_step_30") == {}
    store.backend.sweep("a_cell/global_step_30")
    store.backend.remove("a_cell/global_step_30")
    assert store.has("a_cell/global_step_300")


def test_files_of_an_earlier_upload_do_not_stay(bucket, tmp_path):  # UPLOAD-104, UPLOAD-105, UPLOAD-108
    store, rel = open_store(f"s3://{bucket}/"), "a_cell/global_step_30"
    store.publish(made(tmp_path / "a", {"model-1.safetensors": b"1", "model-2.safetensors": b"2"}), rel)
    new = made(tmp_path / "b", {"model.safetensors": b"12"})
    assert store.publish(new, rel)
    assert stored(bucket) == local_bytes(new, rel)


def test_links_are_published_by_content(bucket, tmp_path):  # UPLOAD-110
    made(tmp_path / "real", {"file": b"content", "folder/inner": b"inner"})
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "file").symlink_to(tmp_path / "real/file")
    (folder / "folder").symlink_to(tmp_path / "real/folder")
    rel = "a_cell/global_step_30"
    try:
        write_manifest(folder, "checkpoint", Provenance(cell="a_cell", global_step=30, fingerprint="f" * 64))
        open_store(f"s3://{bucket}").publish(folder, rel)
    except (ValueError, InputError):
        assert not stored(bucket)
    else:
        assert {k: v for k, v in stored(bucket).items() if MANIFEST not in k} == {
            f"{rel}/file": b"content",
            f"{rel}/folder/inner": b"inner",
        }


def test_one_folder_that_cannot_be_published_leaves_the_others_alone(bucket, tmp_path):  # UPLOAD-112
    store, failed = open_store(f"s3://{bucket}"), []
    folders = {s: made(tmp_path / str(s), SMALL, step=s) for s in (30, 60, 90)}
    (folders[60] / "config.json").write_text("[]")
    for step, folder in folders.items():
        try:
            store.publish(folder, f"a_cell/global_step_{step}")
        except ValueError:
            failed.append(step)
    assert failed == [60]
    assert store.numbered("a_cell", "global_step_") == [30, 90]


@pytest.mark.parametrize("url", ["s3://", "s3:///x", "s3://UPPER/x", "s3://a_b", "gs://bucket/x"])
def test_what_names_no_bucket_is_refused(url):
    with pytest.raises(InputError, match="store="):
        open_store(url)


def test_a_missing_bucket_is_named(bucket):
    store = open_store("s3://there-is-no-such-bucket/x")
    with pytest.raises(MachineError, match="bucket"):
        store.check_writable()
    with pytest.raises(InputError, match="no bucket 'there-is-no-such-bucket'"):
        store.verify()


def test_missing_credentials_are_named(bucket, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(MachineError, match="credentials"):
        open_store(f"s3://{bucket}").check_writable()


def test_parts_of_a_killed_upload_are_swept(bucket, tmp_path):
    backend = S3Backend(bucket)
    rel = "a_cell/global_step_30"
    for key in (f"{rel}/model.safetensors", "a_cell/global_step_300/model.safetensors"):
        backend.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)
    open_store(f"s3://{bucket}").publish(made(tmp_path / "f", SMALL), rel)
    left = backend.fs.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
    assert [u["Key"] for u in left] == ["a_cell/global_step_300/model.safetensors"]  # another folder's is not ours


class LosesOneEnd(FaultyProxy):
    """Loses one answer: that an upload in parts is complete. `parts` counts those that came."""

    parts = 0

    def _choose(self, request, body):
        self.parts += request.command == "PUT" and "partNumber" in request.path
        if request.command == "POST" and "uploadId" in request.path and not self.injected:
            self.injected["lost"] += 1
            return "lost"
        return None


def test_a_file_whose_last_answer_was_lost_is_not_sent_again(endpoint, bucket, tmp_path, monkeypatch):
    content = random.Random(7).randbytes(2 * PART_BYTES + 1)
    (tmp_path / "x").write_bytes(content)
    proxy = LosesOneEnd(endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    S3Backend(bucket).put(tmp_path / "x", "x")
    assert stored(bucket) == {"x": content}
    proxy.close()
    assert (proxy.injected["lost"], proxy.parts) == (1, 3)


PUBLISHER = """
import sys
from pathlib import Path
from training.store import open_store
open_store(sys.argv[1]).publish(Path(sys.argv[2]), sys.argv[3])
"""


def test_a_killed_publisher_is_gone_on_with_and_sends_no_finished_file_again(endpoint, bucket, tmp_path, wait_for):
    proxy = FaultyProxy(endpoint)
    files = {f"model-{i}.safetensors": random.Random(i).randbytes(6 << 20) for i in range(12)}
    local, rel = made(tmp_path / "f", files), "a_cell/global_step_30"
    command = [sys.executable, "-c", PUBLISHER, f"s3://{bucket}/x", str(local), rel]
    env = {**settings(proxy.url), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(Path(__file__).parents[2])}
    try:
        for many in (2, 5):
            child = subprocess.Popen(command, env=env)
            wait_for(lambda many=many: sum(proxy.sent.values()) >= many, 60, "files", 0.005)
            child.kill()
            child.wait()
            assert not open_store(f"s3://{bucket}/x").has(rel)
        assert subprocess.run(command, env=env, check=False).returncode == 0
    finally:
        proxy.close()
    assert stored(bucket) == {f"x/{k}": v for k, v in local_bytes(local, rel).items()}
    again = [k for k, n in proxy.sent.items() if n > 1]
    assert len(again) <= 2, again  # the one in flight at each kill, if its last byte had arrived


def publish_under_fire(endpoint, bucket, tmp_path, faults, rounds, seed):
    """Publish two cells' checkpoints and records through a proxy that breaks a third of the requests; return it."""
    chance = random.Random(seed)
    proxy = FaultyProxy(endpoint, share=0.3, left=faults, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = Store(f"s3://{bucket}/run", S3Backend(f"{bucket}/run", timeout_s=TIMEOUT_S))
        store.backend.fs.connect()  # reads the settings
    want, todo, wrong = {}, [], []
    for round_ in range(rounds):
        for cell in CELLS:
            rel = f"{cell}/global_step_{30 * (round_ + 1)}"
            files = {f"model-{i}.safetensors": chance.randbytes(chance.randrange(1, 300_000)) for i in range(4)}
            if round_ % 5 == 0:
                files["model-4.safetensors"] = chance.randbytes(2 * PART_BYTES + 7)
            todo.append((made(tmp_path / rel, SMALL | files, cell, 30 * (round_ + 1)), rel))
            want |= {f"run/{k}": v for k, v in local_bytes(*todo[-1]).items()}

    def insist(action):
        for _ in range(20):  # as the task's retries and the flow's loop do
            with contextlib.suppress(OSError):
                return action()
        raise AssertionError("never got through")

    def lane(mine):
        for folder, rel in mine:
            insist(lambda: store.publish(folder, rel))  # noqa: B023
            back = insist(lambda: store.fetch(rel, tmp_path / "back" / rel))  # noqa: B023
            if local_bytes(back, rel) != local_bytes(folder, rel):
                wrong.append(rel)

    lanes = [threading.Thread(target=lane, args=(todo[i::2],)) for i in range(2)]
    for t in lanes:
        t.start()
    for t in lanes:
        t.join()
    proxy.close()
    assert not wrong
    assert stored(bucket) == want  # nothing lost, nothing corrupt, nothing twice
    assert open_store(f"s3://{bucket}/run").verify().ok
    return proxy


def test_faults_lose_break_and_repeat_nothing(endpoint, bucket, tmp_path):
    proxy = publish_under_fire(endpoint, bucket, tmp_path, faults=60, rounds=3, seed=1)
    assert sum(proxy.injected.values()) == 60, proxy.injected
    assert all(n == 1 for n in proxy.sent.values()), proxy.sent


@pytest.mark.campaign
def test_five_hundred_faults(endpoint, bucket, tmp_path, record_property):
    proxy = publish_under_fire(endpoint, bucket, tmp_path, faults=500, rounds=30, seed=2)
    again = sum(n > 1 for n in proxy.sent.values())
    record_property("figures", f"{proxy.injected.total()} faults, {len(proxy.sent)} objects, {again} sent again")
    assert sum(proxy.injected.values()) == 500
    assert set(proxy.injected) == set(FAULTS)
    assert all(n == 1 for n in proxy.sent.values()), [k for k, n in proxy.sent.items() if n > 1]


@pytest.mark.parametrize("fault", ["corrupt_down", "cut", "reset", "500"])
def test_a_fetch_under_fire_brings_the_right_bytes_or_fails(endpoint, bucket, tmp_path, fault, monkeypatch):
    rel = "a_cell/global_step_30"
    local = made(tmp_path / "f", SMALL | {"large": random.Random(5).randbytes(2 * PART_BYTES + 1)})
    open_store(f"s3://{bucket}").publish(local, rel)
    proxy = FaultyProxy(endpoint, share=0.4, faults=(fault,), left=12, seed=3)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    store = Store(f"s3://{bucket}", S3Backend(bucket, timeout_s=TIMEOUT_S))
    for _ in range(5):
        try:
            store.fetch(rel, tmp_path / "back")
            break
        except (OSError, FileNotFoundError):
            continue
    proxy.close()
    assert proxy.injected
    assert local_bytes(tmp_path / "back", rel) == local_bytes(local, rel)
