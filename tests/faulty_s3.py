"""An S3 endpoint on loopback, and a proxy before it that breaks what passes."""

import contextlib
import http.client
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

FAULTS = ("500", "503", "reset", "lost", "timeout", "cut", "cut_up", "corrupt_up", "corrupt_down")
TIMEOUT_S = 1.0
"""What clients of the proxy allow a silent connection."""


def settings(url):
    """Return AWS's own settings that lead a client to an endpoint."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a-planted-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class Endpoint:
    """moto's server in a process of its own."""

    def __init__(self, log):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with log.open("wb") as out:
            self.process = subprocess.Popen(argv, stdout=out, stderr=out)
        self.url = f"http://127.0.0.1:{self.port}"
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            time.sleep(0.1)
        raise AssertionError(log.read_text())

    def close(self):
        self.process.terminate()
        self.process.wait(20)


class FaultyProxy:
    """Passes HTTP on to an endpoint; a share of the requests meets a fault, until `left` are spent.

    `sent` counts, for each object, how often all its bytes arrived and the client was told so. `refused` is a header
    that this server does not know, and the code it answers with.
    """

    def __init__(self, endpoint, *, share=0.0, faults=FAULTS, left=10**9, seed=0, refused=None):
        self.share, self.faults, self.left, self.refused = share, faults, left, refused
        self.random, self.lock = random.Random(seed), threading.Lock()
        self.injected, self.sent, self.down = Counter(), Counter(), False
        self.broken = set()  # uploads of which the endpoint took a part that was broken here
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def handle_any(self):
                proxy.handle(self, endpoint.port)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def handle(self, request, port):
        """Serve one request."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if self.refused and self.refused[0] in request.headers:
            self.injected[self.refused[1]] += 1
            return _refuse(request, 501 if self.refused[1] == "NotImplemented" else 400, self.refused[1], "unknown")
        fault = self._choose(request, body)
        if self.down or fault == "reset":
            return _reset(request)
        if fault == "timeout":
            time.sleep(TIMEOUT_S * 1.5)
            return _reset(request)
        if fault in {"500", "503"}:
            code, reason = ("InternalError", "again") if fault == "500" else ("SlowDown", "Reduce your request rate.")
            return _refuse(request, int(fault), code, reason)
        if fault == "cut_up":
            body = body[: len(body) // 2]
        if fault == "corrupt_up":
            body = _flipped(body, self.random)
        status, headers, content = self._forward(request, port, body)
        if fault == "lost":
            return _reset(request)
        if fault == "corrupt_down":
            content = _flipped(content, self.random)
        if fault == "cut":
            _answer(request, status, headers, content[: len(content) // 2], len(content))
            return _reset(request)
        self._note(request, fault, status)
        return _answer(request, status, headers, content)

    def _choose(self, request, body):
        """Pick a fault that means something for this request, or none."""
        is_object = "?" not in request.path or "partNumber" in request.path
        with self.lock:
            if self.left <= 0 or self.random.random() >= self.share:
                return None
            fault = self.random.choice(self.faults)
            if fault in {"cut_up", "corrupt_up"} and not (request.command == "PUT" and body and is_object):
                return None
            if fault in {"corrupt_down", "cut"} and not (request.command == "GET" and is_object):
                return None
            self.left -= 1
            self.injected[fault] += 1
            return fault

    def _forward(self, request, port, body):
        to = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            dropped = {"host", "connection", "content-length", "expect"}
            headers = {k: v for k, v in request.headers.items() if k.lower() not in dropped}
            headers["Content-Length"] = str(len(body))
            to.request(request.command, request.path, body, headers)
            answer = to.getresponse()
            content = answer.read()
            kept = {k: v for k, v in answer.getheaders() if k.lower() not in {"connection", "transfer-encoding"}}
            return answer.status, kept, content
        finally:
            to.close()

    def _note(self, request, fault, status):
        parts = urlsplit(request.path)
        upload = parse_qs(parts.query).get("uploadId", [None])[0]
        with self.lock:
            if status == 200 and upload and fault in {"cut_up", "corrupt_up"}:
                self.broken.add(upload)
            completes = request.command == "POST" and upload and upload not in self.broken
            whole = completes or (request.command == "PUT" and not parts.query)
            if whole and status == 200 and fault is None and not _left(request):
                self.sent[parts.path.lstrip("/")] += 1
                if upload:  # completed again, because the answer came late, it sends nothing again
                    self.broken.add(upload)


def _left(request):
    """Whether the client has given up by now: on a busy machine an answer may come after its patience."""
    try:
        return request.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _flipped(content, chance):
    if not content:
        return content
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 0x20]) + content[at + 1 :]


def _answer(request, status, headers, content, length=None):
    with contextlib.suppress(OSError):
        request.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or request.command == "HEAD":
                request.send_header(name, value)
        if request.command != "HEAD":
            request.send_header("Content-Length", str(len(content) if length is None else length))
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)


def _refuse(request, status, code, reason):
    text = f"<Error><Code>{code}</Code><Message>{reason}</Message></Error>".encode()
    return _answer(request, status, {"Content-Type": "application/xml"}, text)


def _reset(request):
    with contextlib.suppress(OSError):
        request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.close_connection = True
    with contextlib.suppress(OSError):
        request.connection.close()
