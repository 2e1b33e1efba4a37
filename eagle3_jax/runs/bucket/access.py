"""Checks a bucket's address before work begins."""

from __future__ import annotations

import importlib.util
import re
import uuid
from typing import Final

from eagle3_jax.runs.bucket import clients, objects

_PACKAGES: Final = ("gcsfs", "google.cloud.storage", "tensorstore", "etils")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_TIMEOUT: Final = 20.0  # seconds for the answer to a first request


def check(address: str, *, writable: bool) -> None:
    """Checks that the bucket of an address exists and, with `writable`, takes an object below the address.

    Raises:
        ValueError: "got ..., expected ...", without the field's name.
    """
    bucket, _ = clients.split(address)
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
        client = clients.client()
        if next(iter(client.list_blobs(bucket, max_results=1, timeout=_TIMEOUT, retry=None)), None) is None:
            client.get_bucket(bucket, timeout=_TIMEOUT, retry=None)  # an emulator lists a missing bucket as empty
        if writable:
            objects.put(clients.path_of(probe), b"", objects.ABSENT, timeout=_TIMEOUT, retry=False)
            objects.remove(clients.path_of(probe))
    except (exceptions.GoogleAPICallError, exceptions.RetryError, auth.GoogleAuthError, OSError) as error:
        cause, wanted = error.__cause__ if isinstance(error, objects.BucketError) else error, "that answers"
        if isinstance(cause, exceptions.NotFound):
            wanted = "that exists"
        elif isinstance(cause, exceptions.Forbidden | exceptions.Unauthorized):
            kind = f"{clients.CREDENTIALS}={clients.credentials_kind()}"
            wanted = f"that may be {'written' if writable else 'read'} with {kind}"
        raise ValueError(f"got {address!r}, expected a bucket {wanted} ({clients.reason(error)})") from error


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
