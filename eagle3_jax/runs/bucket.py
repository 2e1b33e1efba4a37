"""Cloud Storage by address (`gs://bucket/path`): paths, whole objects, ranges of them, leases and logs.

`disk` offers the same functions for a local folder. Each of three clients has one strength: `etils.epath` gives paths,
which Orbax takes too; google-cloud-storage writes an object under a generation precondition; TensorStore reads ranges
from many threads at once. Cloud Storage lists and reads the newest writes, so nothing is cached.

`STORAGE_EMULATOR_HOST` names an emulator. Otherwise EAGLE3_JAX_CREDENTIALS says who asks:

    user       the default: the file that `gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS made
    machine    the service account of this VM, from its metadata server: the only choice that asks the network
    anonymous  nobody: buckets that all may read
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import importlib.util
import io
import json
import os
import pathlib
import queue
import re
import shutil
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

# A path of either store: `etils.epath` has pathlib's methods, apart from `stat().st_size` (`size`) and `rglob`.
if TYPE_CHECKING:
    Path = pathlib.Path
else:
    Path = pathlib.PurePath

SCHEME: Final = "gs://"
CREDENTIALS: Final = "EAGLE3_JAX_CREDENTIALS"
CREDENTIAL_KINDS: Final = ("user", "machine", "anonymous")
EMULATOR: Final = "STORAGE_EMULATOR_HOST"
ABSENT: Final = 0  # the generation of an object that does not exist
LEASE_SECONDS: Final = "EAGLE3_JAX_LEASE_SECONDS"  # a lease that its holder has not renewed for so long has ended
SEGMENT_SECONDS: Final = 5.0  # a log is sealed at least so often: a kill loses no more
_SEGMENT_BYTES: Final = 4 << 20
_BEGINS: Final = ".begins.jsonl"  # of a segment that begins its log anew
_PIECE: Final = 32 << 20  # bytes of one ranged read of a whole object
_AT_ONCE: Final = 4  # such reads on their way
_PACKAGES: Final = ("gcsfs", "google.cloud.storage", "tensorstore", "etils")
_NOWHERE: Final = "127.0.0.1:9"  # the discard port: refused at once
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class BucketError(OSError):
    """A bucket that does not exist, may not be used, or did not take an object; the message names the address."""


class Conflict(BucketError):
    """An object that another writer replaced in the meantime."""


def is_address(path: Any) -> bool:
    """Tells whether a path or text is the address of a bucket."""
    return str(path).startswith(SCHEME)


def path_of(address: Any) -> Path:
    """Makes a path from an address."""
    _configure()
    from etils import epath

    found: Any = epath.Path(str(address))
    return found


def split(address: Any) -> tuple[str, str]:
    """Splits an address into bucket and object name."""
    bucket, _, name = str(address).removeprefix(SCHEME).partition("/")
    return bucket, name


def check(address: str, *, writable: bool) -> None:
    """Looks whether the bucket of an address exists and, with `writable`, takes an object below the address.

    Raises:
        ValueError: "got ..., expected ...", without the field's name.
    """
    bucket, _ = split(address)
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(f"got {address!r}, expected gs://BUCKET/FOLDER")
    missing = [name for name in _PACKAGES if not _is_installed(name)]
    if missing:
        raise ValueError(
            f"got {address!r} without {', '.join(missing)}, expected the extra `gcs`: pip install 'eagle3-jax[gcs]'"
        )
    from google.api_core import exceptions
    from google.auth import exceptions as auth

    probe = f"{address.rstrip('/')}/.probe-{uuid.uuid4().hex}"
    try:
        if next(iter(_client().list_blobs(bucket, max_results=1, timeout=_TIMEOUT, retry=None)), None) is None:
            _client().get_bucket(bucket, timeout=_TIMEOUT, retry=None)  # an emulator lists what is not there as empty
        if writable:
            put(path_of(probe), b"", ABSENT, timeout=_TIMEOUT, retry=False)
            remove(path_of(probe))
    except (exceptions.GoogleAPICallError, exceptions.RetryError, auth.GoogleAuthError, OSError) as error:
        cause, wanted = error.__cause__ if isinstance(error, BucketError) else error, "that answers"
        if isinstance(cause, exceptions.NotFound):
            wanted = "that exists"
        elif isinstance(cause, exceptions.Forbidden | exceptions.Unauthorized):
            wanted = f"that may be {'written' if writable else 'read'} with {CREDENTIALS}={_kind()}"
        raise ValueError(f"got {address!r}, expected a bucket {wanted} ({_reason(error)})") from error


_TIMEOUT: Final = 20.0  # seconds for the answer to a first request


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


# ------------------------------------------------------------------------------------------------------------- objects
def generation(path: Path) -> int:
    """Returns the generation of an object; ABSENT where there is none."""
    found = _blob(path)
    return ABSENT if found is None else found.generation


def _blob(path: Path) -> Any:
    """Returns the metadata of an object; None where there is none. Raises BucketError."""
    bucket, name = split(path)
    with _answered(path):
        return _client().bucket(bucket).get_blob(name)


@contextlib.contextmanager
def _answered(path: Path) -> Iterator[None]:
    """Turns errors of google-cloud-storage, and TensorStore's ValueError, into BucketError."""
    from google.api_core import exceptions

    try:
        yield
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError, ValueError) as error:
        raise BucketError(f"{path}: {_reason(error)}") from error


def size(path: Path) -> int:
    """Returns the bytes of an object. Raises FileNotFoundError."""
    found = _blob(path)
    if found is None or found.size is None:
        raise FileNotFoundError(2, "No such object", str(path))
    return found.size


def put(path: Path, content: bytes | pathlib.Path, expected: int, timeout: float = 60.0, retry: bool = True) -> int:
    """Writes an object, from memory or a local file, in the place of generation `expected`; returns the new generation.

    Args:
        timeout: seconds of each request.
        retry: asks again for about two minutes where nobody answers.

    Raises:
        Conflict: another generation is there. BucketError: not written.
    """
    from google.api_core import exceptions

    bucket, name = split(path)
    blob = _client().bucket(bucket).blob(name)
    options: dict[str, Any] = {"if_generation_match": expected, "timeout": timeout}
    options |= {} if retry else {"retry": None}
    try:
        if isinstance(content, bytes):
            blob.upload_from_string(content, "application/octet-stream", **options)
        else:
            blob.upload_from_filename(str(content), **options)
    except exceptions.PreconditionFailed as error:
        # A retried request may meet the object that it wrote itself.
        if not isinstance(content, bytes) or (found := _look(path)) is None or found[0] != content:
            raise Conflict(f"{path}: another writer was first") from error
        return found[1]
    except (exceptions.GoogleAPICallError, exceptions.RetryError, OSError) as error:
        raise BucketError(f"{path}: not written ({_reason(error)})") from error
    assert blob.generation is not None
    return blob.generation


def _look(path: Path) -> tuple[bytes, int] | None:
    """Returns the content and generation of a small object; None where there is none."""
    at = generation(path)  # first: where the content is newer, a write in the place of this generation fails
    bucket, name = split(path)
    found = _store(bucket).read(name).result()
    return None if found.state == "missing" else (found.value, at)


def read(path: Path, start: int = 0, stop: int | None = None) -> bytes:
    """Returns the bytes `start` to `stop` of an object, the whole by default; several threads may ask at once.

    Raises:
        FileNotFoundError, BucketError.
    """
    if stop is not None and stop - start > _PIECE:
        return b"".join(pieces(path, start, stop))
    bucket, name = split(path)
    return _result(path, _store(bucket).read(name, byte_range=slice(start, stop)))


def pieces(path: Path, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
    """Yields the bytes `start` to `stop` of an object in order, the whole by default; several ranges are on their way.

    Raises:
        FileNotFoundError, BucketError.
    """
    bucket, name = split(path)
    end, asked = size(path) if stop is None else stop, collections.deque()
    for at in range(start, end, _PIECE):
        asked.append(_store(bucket).read(name, byte_range=slice(at, min(at + _PIECE, end))))
        if len(asked) > _AT_ONCE:
            yield _result(path, asked.popleft())
    while asked:
        yield _result(path, asked.popleft())


def _result(path: Path, asked: Any) -> bytes:
    try:
        found = asked.result()
    except (ValueError, RuntimeError) as error:
        raise BucketError(f"{path}: not read ({_reason(error)})") from error
    if found.state == "missing":
        raise FileNotFoundError(2, "No such object", str(path))
    return found.value


class Ranges(io.RawIOBase):
    """An object as a binary file that is read by ranges."""

    def __init__(self, path: Path) -> None:
        self._path, self._size, self._at = path, size(path), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._size)
        if stop <= self._at:
            return 0
        part = read(self._path, self._at, stop)
        buffer[: len(part)] = part
        self._at = stop
        return len(part)


def open_binary(path: Path) -> io.BufferedReader:
    """Opens an object to be read. Raises FileNotFoundError."""
    return io.BufferedReader(Ranges(path), buffer_size=8 << 20)


def remove(path: Path) -> None:
    """Removes an object, or all below a folder; nothing where there is none. Never a whole bucket."""
    bucket, name = split(path)
    if not name.strip("/"):
        raise ValueError(f"got {path}, expected an object or a folder in the bucket")
    store = _store(bucket)
    with _answered(path):
        store.write(name, None).result()
        store.delete_range(_below(name)).result()


def names_below(folder: Path) -> list[str]:
    """Lists the objects below a folder, relative to it, in order."""
    bucket, name = split(folder)
    prefix = f"{name.rstrip('/')}/" if name else ""
    with _answered(folder):
        keys = _store(bucket).list(_below(name), strip_prefix_length=len(prefix)).result()
    return sorted(key.decode() for key in keys)


def _below(name: str) -> Any:
    import tensorstore

    prefix = f"{name.rstrip('/')}/" if name else ""
    return tensorstore.KvStore.KeyRange(prefix, prefix[:-1] + "0" if prefix else "")  # "0" follows "/"


@contextlib.contextmanager
def staged(path: Path, last: str) -> Iterator[pathlib.Path]:
    """Yields a local path for a file or a folder, and uploads it on success.

    An object takes the place of the generation that was there at the beginning. Of a folder, file `last` is uploaded
    last and must be new: the folder is complete where it is.

    Raises:
        Conflict: another writer was first. BucketError: not written.
    """
    before = generation(path)
    with tempfile.TemporaryDirectory(prefix="eagle3_jax-") as scratch:
        temporary = pathlib.Path(scratch) / path.name
        yield temporary
        if temporary.is_dir():
            files = sorted(file for file in temporary.rglob("*") if file.is_file())
            for file in sorted(files, key=lambda file: file.name == last):
                target = path / str(file.relative_to(temporary))
                put(target, file, ABSENT if file.name == last else generation(target))  # a killed run's gives way
        else:
            put(path, temporary, before)


@functools.lru_cache(16)
def _mirror(folder: str, generations: tuple[tuple[str, int], ...]) -> pathlib.Path:
    local = pathlib.Path(tempfile.mkdtemp(prefix="eagle3_jax-"))
    atexit.register(shutil.rmtree, local, ignore_errors=True)
    for name, _ in generations:
        target = local / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            stream.writelines(pieces(path_of(folder) / name))
    return local


def mirror(folder: Path, without: str) -> pathlib.Path:
    """Copies the objects directly below a folder to a local one, which this process removes at its end.

    Args:
        without: the ending of objects that are not copied.
    """
    bucket, name = split(folder)
    with _answered(folder):
        blobs = list(_client().list_blobs(bucket, prefix=f"{name.rstrip('/')}/", delimiter="/"))
    held = sorted((blob.name.rpartition("/")[2], blob.generation) for blob in blobs)
    return _mirror(str(folder), tuple((name, found) for name, found in held if name and not name.endswith(without)))


# ------------------------------------------------------------------------------------------------------------- leases
class Held(BucketError):
    """A lease that another process holds."""


def lease_seconds() -> float:
    """Returns how long a lease lives without being renewed."""
    value = os.environ.get(LEASE_SECONDS, "60")
    if not re.fullmatch(r"\d+(\.\d+)?", value) or not float(value):
        raise ValueError(f"{LEASE_SECONDS}: got {value!r}, expected seconds")
    return float(value)


@contextlib.contextmanager
def lease(path: Path, owner: str, lost: Callable[[str], None]) -> Iterator[None]:
    """Holds the lease in object `path` until the block ends, and renews it meanwhile.

    Each renewal is a new generation of the object. A holder is dead when the object stays at one generation for
    `lease_seconds`, which a claimant watches itself: the clocks of two hosts are never compared.

    Args:
        owner: names the holder, for others' errors.
        lost: called in another thread, with a sentence, when the lease could not be renewed in time.

    Raises:
        Held: by another process; the message is its owner.
    """
    seconds = lease_seconds()
    token = uuid.uuid4().hex
    held = _claim(path, owner, token, seconds)
    over = threading.Event()
    renewer = threading.Thread(target=_renew, args=(path, owner, token, held, seconds, over, lost), daemon=True)
    renewer.start()
    try:
        yield
    finally:
        over.set()
        renewer.join()
        with contextlib.suppress(OSError):  # it ends by itself then
            if (found := _look(path)) is not None and token.encode() in found[0]:
                put(path, _lease("", token, 0), found[1])


def holder(path: Path) -> str:
    """Returns the owner of a lease; empty where nobody holds it."""
    found = _look(path)
    return "" if found is None else _owner(found[0])


def _lease(owner: str, token: str, renewal: int) -> bytes:
    return json.dumps({"owner": owner, "token": token, "renewal": renewal}).encode()


def _owner(content: bytes) -> str:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(content)["owner"])
    return "another process"


def _claim(path: Path, owner: str, token: str, seconds: float) -> int:
    """Takes a free lease, or one whose holder is dead. Returns its generation. Raises Held."""
    first, until = None, time.monotonic() + seconds
    while True:
        found = _look(path)
        at = ABSENT if found is None else found[1]
        other = "" if found is None else _owner(found[0])
        if first is None:
            first = at
            if other:
                print(f"{path}: held by {other}; watching for {seconds:g} s whether it lives", file=sys.stderr)
        if other and at != first:
            raise Held(other)
        if not other or time.monotonic() > until:
            try:
                return put(path, _lease(owner, token, 0), at)
            except Conflict as error:
                raise Held(holder(path) or "another process") from error
        time.sleep(seconds / 20)


def _renew(
    path: Path, owner: str, token: str, at: int, seconds: float, over: threading.Event, lost: Callable[[str], None]
) -> None:
    renewal, last = 0, time.monotonic()
    while not over.wait(seconds / 6):
        renewal += 1
        try:
            at = put(path, _lease(owner, token, renewal), at, timeout=seconds / 4, retry=False)
            last = time.monotonic()
        except OSError as error:
            with contextlib.suppress(OSError):
                # A renewal whose answer was lost is this run's own, and its generation is not known.
                if isinstance(error, Conflict) and (found := _look(path)) is not None:
                    if token.encode() not in found[0]:
                        lost(f"{path}: the lease was taken by {_owner(found[0]) or 'another process'}, this run ends")
                        return
                    at = found[1]
            if time.monotonic() - last > seconds * 2 / 3:
                passed = time.monotonic() - last
                lost(f"{path}: the lease was not renewed for {passed:.0f} s, this run ends ({error})")
                return


# --------------------------------------------------------------------------------------------------------------- logs
class SegmentedLog:
    """A log as a folder of sealed segments: objects that are written once, in the background, and never changed.

    A segment holds the lines of a few seconds. Only the holder of the folder's lease may write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._bytes, self._since = folder, 0, 0.0
        self._lines: list[bytes] = []
        self._next = _next_segment(names_below(folder))
        self._sealed: queue.Queue[bytes | None] = queue.Queue()
        self._lock = threading.Lock()
        self._error: OSError | None = None
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def write(self, line: str) -> None:
        """Adds a line, with its line feed. Raises BucketError: an earlier segment was not written."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._lines:
                self._since = time.monotonic()
            self._lines.append(line.encode())
            self._bytes += len(self._lines[-1])
        if self._bytes >= _SEGMENT_BYTES:
            self._seal()

    def _seal(self) -> None:
        with self._lock:
            if self._lines:
                self._sealed.put(b"".join(self._lines))
                self._lines, self._bytes = [], 0

    def close(self) -> None:
        """Seals what is left and waits for its writing. Raises BucketError."""
        self._seal()
        self._sealed.put(None)
        self._writer.join()
        if self._error is not None:
            raise self._error

    def _write(self) -> None:
        while True:
            try:
                content = self._sealed.get(timeout=0.5)
            except queue.Empty:
                if self._lines and time.monotonic() - self._since > SEGMENT_SECONDS:
                    self._seal()
                continue
            if content is None:
                return
            try:
                put(self._folder / f"{self._next:06d}.jsonl", content, ABSENT)
                self._next += 1
            except OSError as error:
                self._error = error
                return


def read_segments(folder: Path) -> Iterator[bytes]:
    """Yields the segments of a log in order, from the last one on that begins it."""
    names = names_below(folder)
    begins = [at for at, name in enumerate(names) if name.endswith(_BEGINS)]
    for name in names[begins[-1] if begins else 0 :]:
        yield read(folder / name)


def rewrite_log(folder: Path, content: bytes) -> None:
    """Replaces a log by one write: of a segment in front of which none counts."""
    names = names_below(folder)
    put(folder / f"{_next_segment(names):06d}{_BEGINS}", content, ABSENT)
    for name in names:
        remove(folder / name)


def _next_segment(names: list[str]) -> int:
    return max((int(name.partition(".")[0]) for name in names), default=0) + 1


# ------------------------------------------------------------------------------------------------------------- clients
def _kind() -> str:
    kind = os.environ.get(CREDENTIALS, "user")
    if kind not in CREDENTIAL_KINDS:
        raise ValueError(f"{CREDENTIALS}: got {kind!r}, expected one of {', '.join(CREDENTIAL_KINDS)}")
    return "anonymous" if os.environ.get(EMULATOR) else kind


@functools.cache
def _configure() -> None:
    """Sets the variables that name credentials and address to all clients, Orbax' too; call before their import."""
    kind, emulator = _kind(), os.environ.get(EMULATOR)
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url.rstrip("/")
        os.environ.setdefault(
            "GOOGLE_AUTH_TOKEN_FOR_TESTING", "anonymous"
        )  # else TensorStore looks for a file, and says so
    if kind != "machine":  # nothing asks the metadata server then, neither google-auth nor TensorStore
        os.environ["NO_GCE_CHECK"] = "true"
        os.environ["GCE_METADATA_HOST"] = os.environ["GCE_METADATA_ROOT"] = _NOWHERE
    if kind == "anonymous":
        os.environ.pop("GOOGLE_APPLICATION_CREDENTIALS", None)
        os.environ["CLOUDSDK_CONFIG"] = os.devnull
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # it asks for credentials of its own
    import fsspec.config

    token = {"user": "google_default", "machine": "cloud", "anonymous": "anon"}[kind]
    for scheme in ("gs", "gcs"):
        fsspec.config.conf[scheme] = {"token": token, "use_listings_cache": False}


@functools.cache
def _client() -> Any:
    """Makes google-cloud-storage's client. Raises ValueError: the named credentials do not exist."""
    _configure()
    import google.auth
    from google.auth import compute_engine, credentials, exceptions
    from google.cloud import storage

    kind = _kind()
    if kind == "anonymous":
        found: Any = credentials.AnonymousCredentials()
    elif kind == "machine":
        found = compute_engine.Credentials()
    else:
        try:
            found, _ = google.auth.default()
        except exceptions.DefaultCredentialsError as error:
            expected = "`gcloud auth application-default login`, or machine or anonymous"
            raise ValueError(f"{CREDENTIALS}: got user without a file of credentials, expected {expected}") from error
    return storage.Client(project="none", credentials=found)  # it reads STORAGE_EMULATOR_HOST itself


@functools.cache
def _store(bucket: str) -> Any:
    """Opens TensorStore's view of a bucket."""
    _configure()
    import tensorstore

    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket}).result()


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
