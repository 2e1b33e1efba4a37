"""Addresses of Cloud Storage (`gs://bucket/path`), its clients, and their credentials.

`STORAGE_EMULATOR_HOST` names an emulator. Otherwise EAGLE3_JAX_CREDENTIALS chooses the credentials:

    user       the default: the file that `gcloud auth application-default login` or GOOGLE_APPLICATION_CREDENTIALS made
    machine    the service account of this VM, from its metadata server: the only choice that asks the network
    anonymous  none: buckets that all may read
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final, cast

from eagle3_jax.runs.store import Path

CREDENTIALS: Final = "EAGLE3_JAX_CREDENTIALS"
CREDENTIAL_KINDS: Final = ("user", "machine", "anonymous")
EMULATOR: Final = "STORAGE_EMULATOR_HOST"
SCHEME: Final = "gs://"
_NOWHERE: Final = "127.0.0.1:9"  # the discard port: refused at once


def path_of(address: Any) -> Path:
    """Makes a path from an address."""
    configure()
    from etils import epath

    return cast(Any, epath.Path(str(address)))


def split(address: Any) -> tuple[str, str]:
    """Splits an address into bucket and object name."""
    bucket, _, name = str(address).removeprefix(SCHEME).partition("/")
    return bucket, name


def credentials_kind() -> str:
    """Returns the kind of credentials; those of an emulator are anonymous. Raises ValueError: an unknown kind."""
    kind = os.environ.get(CREDENTIALS, "user")
    if kind not in CREDENTIAL_KINDS:
        raise ValueError(f"{CREDENTIALS}: got {kind!r}, expected one of {', '.join(CREDENTIAL_KINDS)}")
    return "anonymous" if os.environ.get(EMULATOR) else kind


@functools.cache
def configure() -> None:
    """Sets the variables that name credentials and address to all clients, Orbax' too; call before their import."""
    kind, emulator = credentials_kind(), os.environ.get(EMULATOR)
    if emulator:
        url = emulator if "://" in emulator else f"http://{emulator}"
        os.environ["TENSORSTORE_GCS_HTTP_URL"] = url.rstrip("/")
        os.environ.setdefault("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anonymous")  # else TensorStore warns of a missing file
    if kind != "machine":  # keeps google-auth and TensorStore from asking the metadata server
        os.environ["NO_GCE_CHECK"] = "true"
        os.environ["GCE_METADATA_HOST"] = os.environ["GCE_METADATA_ROOT"] = _NOWHERE
    if kind == "anonymous":
        os.environ.pop("GOOGLE_APPLICATION_CREDENTIALS", None)
        os.environ["CLOUDSDK_CONFIG"] = os.devnull
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # the check asks for other credentials
    import fsspec.config

    token = {"user": "google_default", "machine": "cloud", "anonymous": "anon"}[kind]
    for scheme in ("gs", "gcs"):
        fsspec.config.conf[scheme] = {"token": token, "use_listings_cache": False}


def credentials() -> Any:
    """Finds google-auth's credentials of the chosen kind. Raises ValueError: they do not exist."""
    configure()
    import google.auth
    from google.auth import compute_engine, exceptions
    from google.auth import credentials as kinds

    kind = credentials_kind()
    if kind == "anonymous":
        return kinds.AnonymousCredentials()
    if kind == "machine":
        return compute_engine.Credentials()
    try:
        return google.auth.default()[0]
    except exceptions.DefaultCredentialsError as error:
        expected = "`gcloud auth application-default login`, or machine or anonymous"
        raise ValueError(f"{CREDENTIALS}: got user without a file of credentials, expected {expected}") from error


@functools.cache
def client() -> Any:
    """Makes google-cloud-storage's client. Raises ValueError: the named credentials do not exist."""
    found = credentials()
    from google.cloud import storage

    return storage.Client(project="none", credentials=found)  # the client reads STORAGE_EMULATOR_HOST


@functools.cache
def store(bucket: str) -> Any:
    """Opens TensorStore's view of a bucket."""
    configure()
    import tensorstore

    return tensorstore.KvStore.open({"driver": "gcs", "bucket": bucket}).result()


def reason(error: BaseException) -> str:
    """Returns the beginning of an error on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
