"""S3, or what speaks like it, as a storage system of the store: s3fs, with what it leaves open closed.

- Nothing is answered from memory: s3fs caches listings, which another host's upload makes wrong.
- Keys are whole paths: `global_step_30` is never `global_step_300`, and no folder nests in an older one.
- What is stored is proved by what the server has computed of the bytes as they arrived: of an object in parts the
  CRC-32 of the whole, where the server keeps one; else the ETag, their MD5 (four times the processor time); where that
  is something else (encrypted with a key of one's own, sent in other parts) the bytes are read back.
- What may pass (5xx, slow-down, resets, time-outs, broken bodies) is tried again with back-off, then it is an OSError.
- Memory is bounded: two parts of 16 MiB of a file in flight.

Credentials, region and endpoint are AWS's own settings (`AWS_PROFILE`, `AWS_ENDPOINT_URL`, ...), none of ours.
"""

import asyncio
import base64
import errno
import hashlib
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
from s3fs.core import calculate_chunksize

from evaluation.errors import InputError, MachineError
from evaluation.files import PARTIAL

PART_BYTES = 16 << 20
PARTS_IN_FLIGHT = 2
TRIES = 4
FIRST_WAIT_S = 0.5
"""Before the second try; doubled before each after it."""
WHOLE = {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"}
"""Asks the server for a checksum of an object that it puts together; botocore sends each part with one of its own."""
REQUEST_TRIES, CALL_TRIES = 3, 2
"""Of botocore, for one request, and of s3fs round it: a part that fails does not cost the file."""
TIMEOUT_S = 20.0
T = TypeVar("T")
_LASTING = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
"""Of this machine's disk."""
_UNKNOWN_THERE = {"NotImplemented", "InvalidArgument", "InvalidRequest", "MalformedXML"}
"""What a server says that knows no checksums: it is not asked again."""
_FAILURES = (BotoCoreError, ClientError, aiohttp.ClientError, asyncio.TimeoutError, OSError)


class S3Backend:
    """The keys below `s3://BUCKET/PREFIX`."""

    def __init__(self, root: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Nothing is asked yet.

        Args:
            root: `BUCKET` or `BUCKET/PREFIX`.
            timeout_s: how long a connection may say nothing.
        """
        self.root = root.strip("/")
        retries = {"mode": "standard", "total_max_attempts": REQUEST_TRIES}
        config = {
            "connect_timeout": min(10.0, timeout_s),
            "read_timeout": timeout_s,
            "retries": retries,
            # Uploads carry a checksum that S3 checks; what comes back is checked here, against the ETag: an object that
            # was stored broken, where a server checks nothing, must be seen, not be an error for ever.
            "response_checksum_validation": "when_required",
        }
        self.fs: Any = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=config)
        self.fs.retries = CALL_TRIES
        self._whole: dict[str, str] = WHOLE

    def put(self, local: Path, key: str) -> None:
        """Upload; S3 shows an object whole or not at all."""
        options = {"chunksize": PART_BYTES, "max_concurrency": PARTS_IN_FLIGHT}
        in_parts = local.stat().st_size >= 2 * PART_BYTES

        def once(path: str) -> None:
            try:
                self.fs.put_file(str(local), path, **options, **(self._whole if in_parts else {}))
            except FileNotFoundError as e:
                if _code(e) == "NoSuchUpload":  # it was completed, and the answer lost; or somebody gave it up
                    raise OSError(errno.EIO, f"{key}: its upload is gone") from e
                raise
            except OSError as e:
                if _code(e) in _UNKNOWN_THERE:
                    self._whole = {}
                raise

        self._try(key, once)

    def same(self, local: Path, key: str, sha256: str) -> bool:
        """Compare what the server has computed of the bytes; where that proves nothing, read back."""
        size, (crc, own) = local.stat().st_size, _crc_and_sha256(_pieces(local))
        try:
            head = self._try(key, lambda _: self._head(key, ChecksumMode="ENABLED"))
        except FileNotFoundError:
            return False
        if own != sha256 or head["ContentLength"] != size:
            return False
        if (theirs := _crc_of_whole(head)) is not None:
            return theirs == crc
        return _agrees(head, _digests(_pieces(local), size)[0]) or self.sha256(key) == sha256

    def read(self, key: str) -> bytes | None:
        """Download into memory."""
        seen: set[str] = set()

        def once(path: str) -> bytes:
            head, content = self._head(key), self.fs.cat_file(path)
            _refuse_broken(key, head, _digests(iter([content]), len(content))[0], seen)
            return content

        try:
            return self._try(key, once)
        except FileNotFoundError:
            return None

    def sha256(self, key: str) -> str:
        """Hash what is stored, piece by piece."""
        seen: set[str] = set()

        def once(path: str) -> str:
            head = self._head(key)
            with self.fs.open(path, "rb", block_size=PART_BYTES, cache_type="none") as f:
                etag, sha256 = _digests(iter(lambda: f.read(PART_BYTES), b""), head["ContentLength"])
            _refuse_broken(key, head, etag, seen)
            return sha256

        return self._try(key, once)

    def get(self, key: str, local: Path) -> None:
        """Download under another name, and rename."""
        local.parent.mkdir(parents=True, exist_ok=True)
        partial = local.with_name(local.name + PARTIAL)
        seen: set[str] = set()

        def once(path: str) -> None:
            head = self._head(key)
            self.fs.get_file(path, str(partial))
            _refuse_broken(key, head, _digests(_pieces(partial), head["ContentLength"])[0], seen)

        self._try(key, once)
        partial.replace(local)

    def folders(self, folder: str) -> list[str]:
        """Names of common prefixes."""
        found = self._listed(folder, lambda path: self.fs.ls(path, detail=True, refresh=True))
        return sorted(f["name"].rstrip("/").rpartition("/")[2] for f in found if f["type"] == "directory")

    def list(self, folder: str) -> dict[str, int]:
        """Ask for every key below the folder."""
        found = self._listed(folder, lambda path: list(self.fs.find(path, detail=True).values()))
        below = f"{self._at(folder)}/"
        return {f["name"].removeprefix(below): f["size"] for f in found if f["name"] != below}

    def remove(self, key: str) -> None:
        """Delete; S3 does not mind a missing one."""
        bucket, _, name = self._at(key).partition("/")
        self._try(key, lambda _: self.fs.call_s3("delete_object", Bucket=bucket, Key=name))

    def sweep(self, folder: str) -> None:
        """Give up uploads in parts that somebody killed: their parts are stored, and paid for, until then."""
        bucket, _, prefix = f"{self._at(folder)}/".partition("/")
        ask = {"Bucket": bucket, "Prefix": prefix}
        more = True
        while more:
            found = self._try(folder, lambda _, ask=ask: self.fs.call_s3("list_multipart_uploads", **ask))
            for upload in found.get("Uploads", ()):
                self._abort(bucket, upload["Key"], upload["UploadId"])
            more = found.get("IsTruncated", False)
            if more:
                ask |= {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}

    def _abort(self, bucket: str, key: str, upload: str) -> None:
        try:
            self._try(key, lambda _: self.fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload))
        except FileNotFoundError:
            return  # gone by itself

    def _at(self, key: str) -> str:
        return f"{self.root}/{key}".rstrip("/")

    def _head(self, key: str, **options: str) -> dict[str, Any]:
        bucket, _, name = self._at(key).partition("/")
        return self.fs.call_s3("head_object", Bucket=bucket, Key=name, **options)

    def _listed(self, folder: str, ask: Callable[[str], Any]) -> Any:
        try:
            return self._try(folder, lambda path: ask(f"{path}/"))
        except FileNotFoundError as e:
            if _code(e) != "NoSuchBucket":
                return []
            bucket = self.root.partition("/")[0]
            raise InputError("store", f"s3://{self.root}", f"no bucket '{bucket}'", "make it, or name another") from e

    def _try(self, key: str, call: Callable[[str], T]) -> T:
        """Call with the full path; again, with back-off, after what may pass."""
        for attempt in range(TRIES):
            try:
                return call(self._at(key))
            except _FAILURES as e:
                if isinstance(e, FileNotFoundError | PermissionError) or getattr(e, "errno", None) in _LASTING:
                    raise
                if isinstance(e, NoCredentialsError | PartialCredentialsError):
                    fix = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                    raise MachineError("store", f"s3://{self.root}", "no AWS credentials were found", fix) from e
                if attempt == TRIES - 1:
                    raise OSError(errno.EIO, f"{type(e).__name__}: {e}"[:300]) from e
            time.sleep(FIRST_WAIT_S * 2**attempt)
        raise AssertionError("unreachable")


def _code(error: OSError) -> str | None:
    """Return S3's word for what s3fs made an OSError of."""
    return getattr(error.__cause__, "response", {}).get("Error", {}).get("Code")


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as f:
        while piece := f.read(1 << 20):
            yield piece


def _crc_and_sha256(pieces: Iterator[bytes]) -> tuple[str, str]:
    """Return the CRC-32 as S3 writes it (base64 of four bytes, big end first), and the sha256."""
    crc, sha256 = 0, hashlib.sha256()
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
        sha256.update(piece)
    return base64.b64encode(crc.to_bytes(4, "big")).decode(), sha256.hexdigest()


def _crc_of_whole(head: dict[str, Any]) -> str | None:
    """Return an object's CRC-32 where the server has put it together from parts; of one sent whole it may be our own.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html, full object checksums.
    """
    if head.get("ChecksumType") != "FULL_OBJECT" or "-" not in head["ETag"]:
        return None
    return head.get("ChecksumCRC32")


def _digests(pieces: Iterator[bytes], size: int) -> tuple[str, str]:
    """Return what S3's ETag is of bytes that `put` sends, and their sha256.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html, ETag; in parts it is the MD5 of the parts'
    MD5s and their number.
    """
    part_bytes = calculate_chunksize(size, chunksize=PART_BYTES)
    single = size < 2 * part_bytes
    sha256, parts, room = hashlib.sha256(), [hashlib.md5(usedforsecurity=False)], part_bytes
    for piece in pieces:
        sha256.update(piece)
        view = memoryview(piece)
        while view:
            if not single and not room:
                parts.append(hashlib.md5(usedforsecurity=False))
                room = part_bytes
            taken = view if single else view[:room]
            parts[-1].update(taken)
            room, view = room - len(taken), view[len(taken) :]
    if single:
        return parts[0].hexdigest(), sha256.hexdigest()
    of_parts = hashlib.md5(b"".join(p.digest() for p in parts), usedforsecurity=False)
    return f"{of_parts.hexdigest()}-{len(parts)}", sha256.hexdigest()


def _agrees(head: dict[str, Any], etag: str) -> bool | None:
    """Compare an object's ETag with that of bytes sent by `put`; None where it is no MD5 of such parts."""
    keyed = head.get("SSECustomerAlgorithm") or head.get("ServerSideEncryption", "AES256") != "AES256"
    theirs = head["ETag"].strip('"')
    if keyed or theirs.partition("-")[2] != etag.partition("-")[2]:
        return None
    return theirs == etag


def _refuse_broken(key: str, head: dict[str, Any], etag: str, seen: set[str]) -> None:
    """Refuse bytes that came over another ETag than the object's; not a second time: then its ETag is no MD5."""
    if _agrees(head, etag) is False and etag not in seen:
        seen.add(etag)
        raise OSError(errno.EIO, f"{key}: other bytes came than are stored")
