"""A mailbox in an S3 bucket: AWS, Cloudflare R2, MinIO, Hugging Face buckets and others, through boto3.

Only what all of them have is used: PutObject with ``If-None-Match: *``, ranged GetObject, ListObjectsV2 with
StartAfter, DeleteObject, and unconditional multipart uploads. boto3's hidden retries are off, since a retried
conditional write that was carried out answers "exists" for our own object; :class:`RetryingMailbox` retries.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as NoConnection

from gradientmail_torch.errors import ConfigError, MailboxDenied, MailboxError, MailboxMissing, MailboxUnavailable, MailboxUnsupported
from gradientmail_torch.keys import check_key
from gradientmail_torch.mailbox.base import Body, body_size, read_body

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MULTIPART_BYTES = PART_BYTES = 16 << 20
PARTS_AT_A_TIME = 4
_LETTERS = "%-.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz~"
# "classic": the CRT client ignores endpoint_url and may write to AWS instead (boto3#4839).
_TRANSFER = TransferConfig(
    multipart_threshold=MULTIPART_BYTES, multipart_chunksize=8 << 20, max_concurrency=4, preferred_transfer_client="classic"
)
# Parts that are in memory at the same time; ten otherwise. boto3 takes it only as an attribute.
_TRANSFER.max_in_memory_upload_chunks = 3


_BUCKET = re.compile(r"[A-Za-z0-9._-]{3,255}|arn:[A-Za-z0-9:/._-]+")


class _Part(NamedTuple):
    content: bytes
    etag: str
    object_bytes: int
    """Length of the whole object, where a window of it was asked for."""


class S3Mailbox:
    """``prefix`` separates the runs of a bucket. Credentials come from boto3's usual places."""

    def __init__(self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None, region: str | None = None) -> None:
        self.bucket = bucket
        self.prefix = check_key(prefix.strip("/")) + "/" if prefix.strip("/") else ""
        self.endpoint_url = endpoint_url
        if not _BUCKET.fullmatch(bucket):
            raise ConfigError(f"bucket {bucket!r} cannot be: a bucket's name is of lower-case letters, digits, '-' and '.'")
        plain_http = bool(endpoint_url and endpoint_url.startswith("http://"))
        try:
            self._client: S3Client = boto3.session.Session().client(
                "s3",
                endpoint_url=endpoint_url,
                region_name=region or ("auto" if endpoint_url else None),
                config=Config(
                    retries={"total_max_attempts": 1},
                    connect_timeout=10,
                    read_timeout=30,
                    max_pool_connections=32,
                    # Checksums on by default break several stores; the protocol has digests of its own.
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    s3={
                        "addressing_style": "path" if endpoint_url else "auto",
                        **({"payload_signing_enabled": False} if plain_http else {}),
                    },
                ),
            )
        except (BotoCoreError, ValueError) as error:
            raise MailboxDenied(f"cannot open {self!r}: {error}") from error

    def __repr__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}" + (f" at {self.endpoint_url}" if self.endpoint_url else "")

    def get(self, key: str, *, start: int = 0, length: int | None = None) -> bytes | None:
        if length == 0:
            return b"" if self.get(key, length=1) is not None else None
        with self._translated("get", key):
            if length is None or length <= PART_BYTES:
                part = self._get_part(key, start, length)
                return part.content if part is not None else None
            return self._get_in_parts(key, start, length)

    def _get_in_parts(self, key: str, start: int, length: int) -> bytes | None:
        """One stream does not fill a fast link: what is behind the first part is fetched by several at a time."""
        first = self._get_part(key, start, PART_BYTES)
        if first is None or len(first.content) < PART_BYTES:
            return first.content if first is not None else None
        if first.object_bytes == 0:  # the store does not say how much there is
            whole = self._get_part(key, start, length)
            return whole.content if whole is not None else None
        end = min(start + length, first.object_bytes)
        offsets = range(start + PART_BYTES, end, PART_BYTES)
        with ThreadPoolExecutor(PARTS_AT_A_TIME, thread_name_prefix="gradientmail-get") as pool:
            rest = list(pool.map(lambda offset: self._get_part(key, offset, min(PART_BYTES, end - offset)), offsets))
        found = [first, *(part for part in rest if part is not None)]
        if len(found) <= len(rest) or len({part.etag for part in found}) > 1:
            raise MailboxUnavailable(f"{key!r} in {self!r} changed while it was being read")
        return b"".join(part.content for part in found)

    def _get_part(self, key: str, start: int, length: int | None) -> _Part | None:
        window = {} if start == 0 and length is None else {"Range": f"bytes={start}-{'' if length is None else start + length - 1}"}
        try:
            answer = self._client.get_object(Bucket=self.bucket, Key=self._full(key), **window)  # type: ignore[arg-type]
            total = int(answer.get("ContentRange", "/0").rpartition("/")[2])
            return _Part(answer["Body"].read(), answer["ETag"], total)
        except ClientError as error:
            if _code(error) in ("NoSuchKey", "404"):
                return None
            if _code(error) in ("InvalidRange", "416"):  # it begins behind the object's end
                return _Part(b"", "", 0)
            raise

    def put(self, key: str, body: Body) -> None:
        with self._translated("put", key):
            if body_size(body) < MULTIPART_BYTES:
                self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=read_body(body))
            else:
                file: Any = _Unclosed(body) if not isinstance(body, (bytes, bytearray, memoryview)) else BytesIO(body)
                self._client.upload_fileobj(file, self.bucket, self._full(key), Config=_TRANSFER)

    def put_if_absent(self, key: str, body: Body) -> bool:
        with self._translated("create", key):
            try:
                self._client.put_object(Bucket=self.bucket, Key=self._full(key), Body=read_body(body), IfNoneMatch="*")
            except ClientError as error:
                if _code(error) in ("PreconditionFailed", "412"):
                    return False
                raise
            return True

    def list(self, prefix: str, *, after: str = "") -> Iterator[str]:
        if after and not after.startswith(prefix):
            if after > prefix:
                return
            after = ""
        # SeaweedFS loses keys where StartAfter is the name of a folder or meets a prefix that is not one, and lists
        # others' where it lies outside of the prefix.
        asked = prefix[: prefix.rfind("/") + 1] if after else prefix
        start = _just_before(after)
        window: dict[str, Any] = {"StartAfter": self.prefix + start} if start else {}
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=self.prefix + asked, **window)
        with self._translated("list", prefix):
            for page in pages:
                for entry in page.get("Contents", ()):
                    key = entry["Key"][len(self.prefix) :]
                    if key.startswith(prefix):
                        if not start < key <= after:
                            yield key
                    elif key > prefix:
                        return

    def delete(self, key: str) -> None:
        with self._translated("delete", key):
            self._client.delete_object(Bucket=self.bucket, Key=self._full(key))

    def server_time(self) -> float | None:
        """Seconds since 1970 by the store's clock, to the second; None where it does not say. One listing."""
        with self._translated("ask the time at", self.prefix):
            metadata: Any
            try:
                metadata = self._client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)["ResponseMetadata"]
            except ClientError as error:  # a refusal bears the time as well
                metadata = error.response["ResponseMetadata"]
        date = metadata.get("HTTPHeaders", {}).get("date")
        return parsedate_to_datetime(date).timestamp() if date else None

    def _full(self, key: str) -> str:
        return self.prefix + check_key(key)

    @contextmanager
    def _translated(self, operation: str, key: str) -> Iterator[None]:
        """Turn what boto3 raises into an error of our tree that names bucket, key and cure."""
        try:
            yield
        except ClientError as error:
            raise _translate(error, f"{operation} {key!r} in {self!r}") from error
        except (NoCredentialsError, PartialCredentialsError) as error:
            raise MailboxDenied(
                f"no credentials to {operation} {key!r} in {self!r}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from error
        except (HTTPClientError, NoConnection, IncompleteReadError, ConnectionError, TimeoutError) as error:
            raise MailboxUnavailable(f"no answer to {operation} {key!r} in {self!r}: {error}") from error
        except BotoCoreError as error:
            raise MailboxError(f"cannot {operation} {key!r} in {self!r}: {error}") from error


def _just_before(key: str) -> str:
    """What sorts before ``key`` with nothing between, and is no name of a folder."""
    lower = [letter for letter in _LETTERS if key and letter < key[-1]]
    return key if not lower or key.endswith("/") else f"{key[:-1]}{lower[-1]}~~~~"


class _Unclosed:
    """A file that the transfer manager may read but not close: a retry reads it again."""

    def __init__(self, file: object) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return (lambda: None) if name == "close" else getattr(self._file, name)


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def _translate(error: ClientError, what: str) -> MailboxError:
    code = _code(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    message = f"cannot {what}: {code or status} {error.response.get('Error', {}).get('Message', '')}".rstrip()
    if code == "NoSuchBucket":
        return MailboxMissing(f"{message}. Create the bucket, or correct its name in the URL")
    if code == "RequestTimeTooSkewed":
        return MailboxDenied(f"{message}. Set this machine's clock")
    if status == 301 or code in ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"):
        return MailboxDenied(f"{message}. The bucket is in another region: add ?region=… to the URL")
    if status in (401, 403):
        return MailboxDenied(f"{message}. Check the credentials; they need GetObject, PutObject, DeleteObject and ListBucket on the prefix")
    if status == 501 or code == "NotImplemented":
        return MailboxUnsupported(f"{message}. Use a store with conditional writes, such as AWS S3, R2, MinIO or SeaweedFS")
    # 409: another conditional write of this key is under way; the next attempt tells who won.
    if status in (408, 409, 429) or status >= 500 or code in ("SlowDown", "RequestTimeout", "ThrottlingException"):
        return MailboxUnavailable(message)
    return MailboxError(message)
