"""An S3 store over real HTTP on loopback (moto), behind a proxy that makes faults on demand."""

from __future__ import annotations

import http.client
import http.server
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer

KEYS = {
    "AWS_ACCESS_KEY_ID": "canary-key",
    "AWS_SECRET_ACCESS_KEY": "canary-secret",
    "AWS_SESSION_TOKEN": "canary-token",
}
ERROR = '<?xml version="1.0"?><Error><Code>{}</Code><Message>canary-message</Message></Error>'


@dataclass
class Fault:
    """What happens to the first `times` requests whose method and path match."""

    method: str
    path: str
    kind: str
    """slow, unavailable, reset, short, expired, other"""
    times: int
    met: int = 0


@dataclass
class Store:
    url: str
    """Of the bucket."""
    client: object
    faults: list[Fault] = field(default_factory=list)
    requests: list[tuple[str, str]] = field(default_factory=list)

    def fault(self, kind: str, path: str, *, method: str = "GET", times: int = 1) -> Fault:
        self.faults.append(Fault(method, path, kind, times))
        return self.faults[-1]

    def files(self) -> dict[str, bytes]:
        found = self.client.list_objects_v2(Bucket="bucket").get("Contents", [])
        return {one["Key"]: self.client.get_object(Bucket="bucket", Key=one["Key"])["Body"].read() for one in found}

    def put(self, key: str, content: bytes) -> None:
        self.client.put_object(Bucket="bucket", Key=key, Body=content)

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket="bucket", Key=key)


@contextmanager
def object_store(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty bucket; the environment is that of a user of it."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (KEYS | {"AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}).items():
        patch.setenv(name, value)
    connection = http.client.HTTPConnection(host, port)
    connection.request("POST", "/moto-api/reset")  # all its servers of a process share their buckets
    connection.getresponse().read()
    connection.close()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="bucket")
    store = Store("s3://bucket", client)
    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(store, f"{host}:{port}"))
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
    patch.setattr("s3fs.S3FileSystem.retries", 1)  # ours are the ones to test
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    yield store
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    proxy.shutdown()
    proxy.server_close()
    thread.join()
    client.close()
    server.stop()


def _handler(store: Store, behind: str) -> Callable:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments):
            pass

        def _answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            store.requests.append((self.command, self.path))
            fault = next(
                (
                    f
                    for f in store.faults
                    if f.met < f.times and f.method == self.command and re.search(f.path, self.path)
                ),
                None,
            )
            if fault:
                fault.met += 1
                if fault.kind == "reset":
                    self.close_connection = True
                    self.connection.close()
                    return
                codes = {
                    "slow": (503, "SlowDown"),
                    "unavailable": (503, "ServiceUnavailable"),
                    "expired": (403, "ExpiredToken"),
                }
                if fault.kind in codes:
                    status, code = codes[fault.kind]
                    return self._send(status, {}, b"" if self.command == "HEAD" else ERROR.format(code).encode())
            connection = http.client.HTTPConnection(behind)
            connection.request(self.command, self.path, body, dict(self.headers))
            response = connection.getresponse()
            content = response.read()
            headers = {
                k: v
                for k, v in response.getheaders()
                if k.lower() not in ("connection", "transfer-encoding", "date", "server")
            }
            connection.close()
            if fault and fault.kind == "other":
                content = bytes([content[0] ^ 1]) + content[1:]
                headers = {k: v for k, v in headers.items() if "checksum" not in k.lower()}
            self._send(response.status, headers, content, cut=bool(fault) and fault.kind == "short")

        def _send(self, status, headers, content, *, cut=False):
            self.send_response_only(status)
            if self.command != "HEAD":
                headers = {k: v for k, v in headers.items() if k.lower() != "content-length"} | {
                    "Content-Length": str(len(content))
                }
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) // 2] if cut else content)
            self.close_connection = cut or self.close_connection

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _answer

    return Handler
