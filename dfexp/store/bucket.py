"""One run's place in a bucket: conditional puts with a checksum, reads that are checked, and what is worth a retry."""

import base64
import hashlib
import random
import re
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from io import BytesIO
from pathlib import Path
from typing import IO, Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, CredentialRetrievalError, HTTPClientError
from botocore.exceptions import ConnectionError as NoConnection
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError as URLError

from dfexp.errors import StoreConflict, StoreError, StoreTaken, StoreUnavailable
from dfexp.jsonl import disk
from dfexp.params import StoreGroup
from dfexp.params_errors import hide_secrets

PROBE = ".probe-"
_PIECE_BYTES, _MOST_WAIT_S = 2**20, 30.0
_PASSING = {
    "SlowDown", "RequestTimeout", "RequestTimeoutException", "InternalError", "ServiceUnavailable", "OperationAborted",
    "BadDigest", "ConditionalRequestConflict", "InvalidDigest", "XAmzContentSHA256Mismatch", "IncompleteBody",
    "ExpiredToken", "RequestExpired", "TooManyRequests", "Throttling", "ThrottlingException", "RequestLimitExceeded",
}  # fmt: skip
_BROKEN = (HTTPClientError, NoConnection, CredentialRetrievalError, ResponseParserError, URLError, OSError)
T = TypeVar("T")


class _Failed(Exception):
    """A condition of a put did not hold."""


class _Unknown(Exception):
    """The store does not know conditions, which the probe asked for."""


class _Missing(Exception):
    """There is no such object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """What became of a put: the object is there with our content. `is_new`: this very call wrote it."""

    etag: str
    is_new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Got:
    """An object that was read whole. `age_s`: seconds since it was written, by the store's own clock."""

    data: bytes
    etag: str
    age_s: float


class Bucket:
    """The objects below `<prefix>/<run>/`, by their names there. May be used in many threads.

    Every call is repeated with full jitter while its error may pass: for `limit_s` seconds, or without a limit until
    `stopped` is set; then errors that only somebody else can mend (a key that was revoked) are waited out too. Raises
    StoreError, of its subclasses StoreUnavailable when it gave up.
    """

    def __init__(
        self, group: StoreGroup, run: str, *, limit_s: float | None = 20.0, stopped: threading.Event | None = None,
        told: Callable[[StoreError | None], None] = lambda error: None,
    ) -> None:  # fmt: skip
        """Args: told, is called with each error that is waited out, and with None after a success."""
        self.group, self.base = group, "/".join([*filter(None, group.prefix.split("/")), run, ""])
        self.is_conditional, self.limit_s = True, limit_s
        self._stopped, self._told = stopped or threading.Event(), told
        self._secrets: list[str] = []
        self.endpoint = group.endpoint_url or "S3"  # until boto3 has said
        try:
            session = boto3.session.Session(region_name=group.region)
            if (found := session.get_credentials()) is None:
                raise StoreError("boto3 finds no credentials: export AWS_PROFILE, or AWS_ACCESS_KEY_ID and others")
            self._secrets = [text for text in found.get_frozen_credentials() if text and len(text) > 3]
            config = Config(
                retries={"total_max_attempts": 1}, max_pool_connections=group.concurrency + 4,
                connect_timeout=min(10, group.timeout_s), read_timeout=group.timeout_s,
                request_checksum_calculation="when_required",
                s3={"addressing_style": "path" if group.path_style else "auto"},
            )  # fmt: skip
            self._s3: Any = session.client("s3", config=config, endpoint_url=group.endpoint_url)
            self.endpoint = self._clean(self._s3.meta.endpoint_url)
        except (BotoCoreError, ValueError) as error:
            raise self._translated(error, "use a store") from None

    def url(self, key: str = "") -> str:
        """An object's name for a person."""
        return f"s3://{self.group.bucket}/{self.base}{key}"

    def put_once(
        self, key: str, body: bytes | Path, sha256: str, *, before: Callable[[], None] = lambda: None,
        is_patient: bool = True,
    ) -> Put:  # fmt: skip
        """Create an object; one with the same content is success. Raises StoreConflict for one with other content.

        Args: before, is called before each attempt; is_patient, wait out too what only somebody else can mend.
        """

        def attempt() -> Put:
            before()
            if self.is_conditional:
                with suppress(_Failed):
                    return self._put(key, body, sha256, IfNoneMatch="*")
            elif self._head(key) is None:
                return self._put(key, body, sha256)
            return self._same(key, sha256)

        return self._repeated(attempt, is_patient=is_patient)

    def replace(self, key: str, body: bytes, sha256: str, etag: str | None) -> str:
        """Replace our own object of that ETag, or create it; returns the new ETag. Raises StoreTaken: it is another.

        One that is gone is created anew, since nobody else has written.
        """

        def attempt() -> str:
            nonlocal etag
            with suppress(_Failed, _Missing, StoreConflict):
                if self.is_conditional:
                    return self._put(key, body, sha256, **({"IfMatch": etag} if etag else {"IfNoneMatch": "*"})).etag
                if (self._head(key) or {}).get("ETag") == etag:
                    return self._put(key, body, sha256).etag
            if (head := self._head(key)) is None:
                etag = None
                raise StoreUnavailable(f"{self.url(key)} is gone; it is put anew")
            with suppress(StoreConflict):  # a put of ours whose answer was lost
                return self._same(key, sha256).etag
            if head.get("ETag") == etag:
                raise StoreUnavailable(f"{self.url(key)} is ours, and the store answered without replacing it")
            raise StoreTaken(
                f"{self.url(key)} was replaced by another process: it goes on with this run. Nothing more is uploaded "
                "from here; the rows are safe in the run's folder."
            )

        return self._repeated(attempt)

    def sha256_of(self, key: str) -> str | None:
        """The checksum that the store keeps of an object, or that of its content; None if there is no object."""
        return self._repeated(lambda: self._sha256(key))

    def get(self, key: str) -> Got | None:
        """Read a small object whole; None if there is none."""
        file = BytesIO()
        if (answer := self.fetch(key, file)) is None:
            return None
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return Got(data=file.getvalue(), etag=answer["ETag"], age_s=(now - answer["LastModified"]).total_seconds())

    def fetch(self, key: str, file: IO[bytes]) -> dict[str, Any] | None:
        """Read an object into a file, its checksum checked. Returns the store's answer; None if there is no object."""
        return self._repeated(lambda: self._read(key, file))

    def sizes(self) -> dict[str, int]:
        """Every object below the prefix: name and bytes. Lists, and reads none."""
        found: dict[str, int] = {}
        more: dict[str, str] | None = {}
        while more is not None:
            page = self._repeated(lambda more=more: self._call("list_objects_v2", Prefix=self.base, **more))  # type: ignore[misc]
            found |= {each["Key"].removeprefix(self.base): each["Size"] for each in page.get("Contents", ())}
            more = {"ContinuationToken": page["NextContinuationToken"]} if page.get("IsTruncated") else None
        return found

    def probe(self) -> bool:
        """Whether the store honours conditions, shown by two puts to a name of their own; it is removed again."""
        key = f"{PROBE}{secrets.token_hex(8)}"
        first, second = ((text, hashlib.sha256(text).hexdigest()) for text in (b"first", b"second"))
        try:
            self._repeated(lambda: self._put(key, *first, IfNoneMatch="*"))
            self._repeated(lambda: self._put(key, *second, IfNoneMatch="*"))
            return False
        except (_Failed, _Unknown) as answer:
            return isinstance(answer, _Failed)
        finally:
            with suppress(StoreError, _Missing, _Unknown):  # whoever may not delete leaves it; it is known by its name
                self._call("delete_object", Key=key)

    def _put(self, key: str, body: bytes | Path, sha256: str, **conditions: str) -> Put:
        """One attempt. Only an answer that repeats our checksum, or the object itself, says that it is there."""
        args = {"ChecksumSHA256": base64.b64encode(bytes.fromhex(sha256)).decode(), **conditions}
        if self.group.storage_class:
            args["StorageClass"] = self.group.storage_class
        with body.open("rb") if isinstance(body, Path) else BytesIO(body) as file:
            answer = self._call("put_object", Key=key, Body=file, **args)
        if answer.get("ChecksumSHA256") == args["ChecksumSHA256"] and answer.get("ETag"):
            return Put(etag=answer["ETag"], is_new=True)
        return self._same(key, sha256)

    def _same(self, key: str, sha256: str) -> Put:
        """The object that is there, if it has our content. Raises StoreConflict, and StoreUnavailable: it has gone."""
        there = self._sha256(key)
        if there is None:
            raise StoreUnavailable(f"{self.url(key)} is not there, although the store said so")
        if there != sha256:
            raise StoreConflict(
                f"bucket {self.group.bucket!r}, key {self.base + key!r}: there is an object with SHA-256 {there}, ours "
                f"has {sha256}. It is left as it is, and ours stays in the run's folder. Move one of the two away."
            )
        return Put(etag=(self._head(key) or {}).get("ETag", ""), is_new=False)

    def _head(self, key: str) -> dict[str, Any] | None:
        with suppress(_Missing):
            return self._call("head_object", Key=key, ChecksumMode="ENABLED")
        return None

    def _sha256(self, key: str) -> str | None:
        if (head := self._head(key)) is None:
            return None
        if re.fullmatch(r"[A-Za-z0-9+/]{43}=", known := head.get("ChecksumSHA256", "")):  # of parts it ends in "-N"
            return base64.b64decode(known).hex()
        with tempfile.TemporaryFile() as file:
            if self._read(key, file) is None:
                return None
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _read(self, key: str, file: IO[bytes]) -> dict[str, Any] | None:
        """One attempt to read an object from its beginning."""
        file.seek(0)
        file.truncate()
        with suppress(_Missing):
            answer = self._call("get_object", Key=key, ChecksumMode="ENABLED")
            while piece := self._piece(key, answer["Body"]):
                with disk(f"write what is read from {self.url(key)}"):
                    file.write(piece)
            if not answer.get("ETag"):
                raise StoreUnavailable(f"cannot read {self.url(key)}: what answered is no S3 store")
            return answer
        return None

    def _piece(self, key: str, body: Any) -> bytes:
        try:
            return bytes(body.read(_PIECE_BYTES))
        except (BotoCoreError, URLError, OSError) as error:  # cut off, or not what its checksum says
            raise StoreUnavailable(f"cannot read {self.url(key)}: {self._clean(str(error))}") from None

    def _call(self, operation: str, **args: Any) -> dict[str, Any]:
        """One request. What it raises holds nothing of the original error and its texts."""
        if "Key" in args:
            args["Key"] = self.base + args["Key"]
        try:
            answer: dict[str, Any] = getattr(self._s3, operation)(Bucket=self.group.bucket, **args)
            return answer
        except (BotoCoreError, ClientError, RecursionError, *_BROKEN) as error:
            code = error.response["Error"].get("Code", "") if isinstance(error, ClientError) else ""
            if code in ("404", "NoSuchKey") and "Key" in args and ("IfMatch" in args or "Body" not in args):
                raise _Missing from None
            if code in ("PreconditionFailed", "412") and args.keys() & {"IfMatch", "IfNoneMatch"}:
                raise _Failed from None
            if code == "NotImplemented" and PROBE in args.get("Key", ""):
                raise _Unknown from None
            raise self._translated(error, operation.replace("_", " ")) from None

    def _translated(self, error: Exception, what: str) -> StoreError:
        """Our error for one of boto3's, without anything secret that it may repeat."""
        is_endless = RecursionError in (type(error), type(error.__context__))  # wherever in botocore the stack ends
        is_passing = isinstance(error, _BROKEN) and not is_endless
        words = "it redirects without an end" if is_endless else str(error)
        if isinstance(error, ClientError):
            said, status = error.response["Error"], error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            words = f"{said.get('Code')} (HTTP {status}): {said.get('Message', '')[:300]}"
            is_passing = status >= 500 or status in (200, 408, 409, 429) or said.get("Code") in _PASSING
        words = f"cannot {what} at {self.endpoint}, bucket {self.group.bucket!r}: {self._clean(words)}"
        return (StoreUnavailable if is_passing else StoreError)(words)

    def _clean(self, words: str) -> str:
        for secret in self._secrets:
            words = words.replace(secret, "***")
        return hide_secrets(" ".join(words.split()))

    def _repeated(self, attempt: Callable[[], T], *, is_patient: bool = True) -> T:
        """Attempt until it succeeds, or fails in a way that is not waited out."""
        began, tries = time.monotonic(), 0
        while True:
            try:
                found = attempt()
            except StoreError as error:
                is_waited_out = error.retryable or (is_patient and self.limit_s is None and type(error) is StoreError)
                wait_s = random.uniform(0, min(_MOST_WAIT_S, 0.25 * 2 ** min(tries, 10)))  # noqa: S311 (jitter)
                is_late = self.limit_s is not None and time.monotonic() + wait_s - began > self.limit_s
                if not is_waited_out or is_late:
                    raise
                self._told(error)
                if self._stopped.wait(wait_s):
                    raise
                tries += 1
            else:
                self._told(None)
                return found
