"""Files in an object store or on a web server, through fsspec: reads that are whole or fail with one clear sentence.

What may pass (503, SlowDown, a dropped connection, half an answer, a time-out) is tried again after growing, random
pauses. Credentials come from where each store's own tools look for them; when they are refused, the connection is made
anew once, since an open one keeps a token that has run out. No message holds a query string, a user or what a library
said, only what was asked for and the kind of the error.
"""

from __future__ import annotations

import io
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from draftsmith.errors import DataError, EnvironmentFault

TRIES = 6
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0
"""Seconds before the second and at most before any try, less a random part."""
CHUNK = 8 << 20
"""Bytes of one request."""
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp"}
REFUSED = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError", "SSOTokenLoadError")
"""Errors of a store's library that say that there are no credentials; they are no PermissionError."""

Result = TypeVar("Result")


def is_remote(name: str) -> bool:
    return "://" in name


def shown(name: str) -> str:
    """A path or URL without what may be secret in it: user, password, query."""
    if not is_remote(name):
        return name
    scheme, rest = name.split("://", 1)
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


class Remote:
    """A place in a store: the files below a URL, or the one file there."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, shown(url).rstrip("/")
        self.system, self._path = self._connect()

    def size(self, file: str = "") -> int | None:
        """Bytes of a file; None if the server does not say. DataError if there is none."""
        return self._ask(file, lambda path: self.system.info(path))["size"]

    def tags(self, file: str = "") -> dict[str, str]:
        """What the store keeps of a file's content: its ETag or hash, if it does."""
        known = self._ask(file, lambda path: self.system.info(path))
        return {key: str(value) for key, value in known.items() if key.lower() in ("etag", "md5hash")}

    def exists(self, file: str = "") -> bool:
        return self._ask(file, lambda path: self.system.exists(path))

    def read(self, start: int, end: int, file: str = "") -> bytes:
        """Bytes [start, end) of a file, all of them."""

        def ask(path: str) -> bytes:
            data = self.system.cat_file(path, start=start, end=end)
            if len(data) > end - start:  # a server that knows no ranges sends everything
                data = data[start:end]
            if len(data) != end - start:
                raise OSError("short read")
            return data

        return self._ask(file, ask) if end > start else b""

    def read_all(self, file: str = "") -> bytes:
        return self._ask(file, lambda path: self.system.cat_file(path))

    def write(self, file: str, data: bytes) -> None:
        self._ask(file, lambda path: self.system.pipe_file(path, data))

    def upload(self, local: str, file: str) -> None:
        """A local file; it is there as a whole or not at all."""
        self._ask(file, lambda path: self.system.put_file(local, path))

    def files(self) -> dict[str, int]:
        """Files below, by what follows the URL, and their sizes. Empty if there are none."""

        def ask(path: str) -> dict[str, int]:
            if not self.system.exists(path):
                return {}
            return {name[len(path) + 1 :]: one["size"] for name, one in self.system.find(path, detail=True).items()}

        return self._ask("", ask)

    def glob(self, pattern: str) -> list[str]:
        return self._ask("", lambda path: self.system.glob(pattern))

    def remove(self, file: str) -> None:
        self._ask(file, lambda path: self.system.rm_file(path))

    def _connect(self, *, anew: bool = False) -> tuple[Any, str]:
        import fsspec

        try:
            system, path = fsspec.url_to_fs(self.url, **({"skip_instance_cache": True} if anew else {}))
        except ImportError as error:
            package = PACKAGES.get(self.url.split("://")[0], "its fsspec implementation")
            raise EnvironmentFault(
                f"{self.name}: this needs {package}; install it with: pip install {package}"
            ) from error
        except ValueError as error:
            raise DataError(f"{self.name}: no such kind of address") from error
        return system, path.rstrip("/")

    def _ask(self, file: str, action: Callable[[str], Result]) -> Result:
        """The action's result for the file's path; tried again as long as that may help."""
        name = f"{self.name}/{file}" if file else self.name
        refused = False
        for number in range(TRIES):
            try:
                self.system.invalidate_cache()  # what was there earlier is of no interest
                return action(f"{self._path}/{file}" if file else self._path)
            except FileNotFoundError:
                raise DataError(f"{name}: no such file") from None
            except Exception as error:
                if not is_of_the_store(error):
                    raise
                reason = _reason(error)
                if isinstance(error, PermissionError) or type(error).__name__ in REFUSED:
                    if refused:
                        raise EnvironmentFault(
                            f"{name}: the store refuses this ({reason}); see that the credentials are there, have not "
                            "expired and allow it. What is complete is kept, so the same command goes on"
                        ) from None
                    refused = True
                    self.system, self._path = self._connect(anew=True)
                    continue
                if number + 1 == TRIES:
                    raise EnvironmentFault(
                        f"{name} could not be reached ({reason}, {TRIES} tries); the same command goes on later"
                    ) from None
            time.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2**number) * random.uniform(0.5, 1.0))
        raise AssertionError("unreachable")


class RemoteFile(io.RawIOBase):
    """A file of a store, read in large pieces."""

    def __init__(self, remote: Remote, size: int) -> None:
        self._remote, self._size, self._at = remote, size, 0
        self._piece, self._piece_start = b"", 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        inside = self._at - self._piece_start
        if not 0 <= inside < len(self._piece):
            self._piece, self._piece_start, inside = b"", self._at, 0
            self._piece = (
                self._remote.read(self._at, min(self._at + CHUNK, self._size)) if self._at < self._size else b""
            )
        data = self._piece[inside : inside + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def pieces(size: int, start: int = 0) -> Iterator[tuple[int, int]]:
    """Stretches of a file to be read one by one."""
    return ((begin, min(begin + CHUNK, size)) for begin in range(start, size, CHUNK))


def is_of_the_store(error: Exception) -> bool:
    """True for what the network or a store's library raises, rather than a mistake of ours."""
    library = type(error).__module__.split(".")[0]
    return isinstance(error, OSError) or library in ("aiohttp", "botocore", "aiobotocore", "gcsfs", "google", "asyncio")


def _reason(error: Exception) -> str:
    """What went wrong, in words that cannot hold a secret: the store's code for it, or the kind of the error."""
    for one in (error, error.__cause__):
        response = getattr(one, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else None
        if isinstance(code, str) and code.isalnum():
            return code
    return "short read" if str(error) == "short read" else type(error).__name__
