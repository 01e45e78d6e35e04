"""Where a record stream is: its URL, the connection, and what the broker's errors mean to us."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from serving_bridge.records import RecordError

PASSWORD_VARIABLE = "DRAFTSMITH_REDIS_PASSWORD"
"""Environment variable with the password of a URL that has none, to keep it out of command lines."""

_FORM = "redis://HOST:PORT/DB?stream=NAME"
_STREAM = re.compile(r"[A-Za-z0-9_.:-]{1,200}")
_SCHEMES = {"redis": False, "rediss": True}
_FILES = ("ca", "cert", "key")
_TOO_LARGE = ("too large", "maximum allowed size", "invalid bulk length")


class StreamError(ValueError):
    """The stream cannot be used as asked; the message names it and the fix."""


class BrokerError(OSError):
    """The broker is down, full, loading, read-only or refuses us: waiting, or its operator, can cure that."""


@dataclass(frozen=True)
class StreamAddress:
    """A stream of a Redis server; ``ca``, ``cert`` and ``key`` are PEM files for TLS."""

    host: str
    port: int
    db: int
    stream: str
    tls: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    def __str__(self) -> str:
        """The URL without user and password, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' * self.tls}://{host}:{self.port}/{self.db}?stream={self.stream}"


def parse_url(url: str) -> StreamAddress:
    """Read ``redis[s]://[USER:PASSWORD@]HOST[:PORT][/DB]?stream=NAME``; ``rediss`` is TLS.

    TLS takes ``&ca=FILE`` (default: the system's authorities) and, where the server wants to know its clients,
    ``&cert=FILE&key=FILE``. Raises ``StreamError`` that names the fix and, as it may hold a password, not the URL.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname
    except ValueError:
        raise _bad("host or port cannot be read; %-encode special characters of the password") from None
    if parts.scheme not in _SCHEMES:
        raise _bad(
            f"{parts.scheme}:// is no known transport; use redis:// or, with TLS, rediss://, or a path"
        )
    if not host:
        raise _bad("the host is missing")
    if parts.fragment:
        raise _bad("a # begins a fragment, which means nothing here; %-encode it")
    if not (db := parts.path.strip("/") or "0").isdecimal():
        raise _bad("the path is the number of the database, 0 as a rule")
    tls = _SCHEMES[parts.scheme]
    options = _options(parts.query, tls)
    return StreamAddress(
        host=host,
        port=port or 6379,
        db=int(db),
        tls=tls,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else os.environ.get(PASSWORD_VARIABLE),
        **options,
    )


def connect(address: StreamAddress, timeout_s: float) -> Any:
    """Return a ``redis.Redis`` that connects with its first command; ``timeout_s`` bounds each wait for the socket.

    Raises ``StreamError`` if the client library is not installed or a TLS file is not there.
    """
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise StreamError(
            f"{address}: the redis package is missing; run: pip install 'draftsmith[redis]'"
        ) from error
    options: dict[str, Any] = {}
    if address.tls:
        options = {
            "ssl": True,
            "ssl_cert_reqs": "required",
            "ssl_check_hostname": True,
            "ssl_ca_certs": address.ca,
            "ssl_certfile": address.cert,
            "ssl_keyfile": address.key,
        }
    for name in _FILES:
        path = getattr(address, name)
        if path is not None and not Path(path).is_file():
            raise StreamError(f"{address}: {name}={path} is not a file")
    return redis.Redis(
        host=address.host,
        port=address.port,
        db=address.db,
        username=address.username,
        password=address.password,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        socket_keepalive=True,
        # Answers then look the same in every version of the client.
        protocol=2,
        # The caller decides about retries: hidden ones would only hold up the news.
        retry=Retry(NoBackoff(), 0),
        **options,
    )


@contextlib.contextmanager
def broker_errors(address: StreamAddress) -> Iterator[None]:
    """Turn the client's errors into ``BrokerError``, ``StreamError`` or, for one record, ``RecordError``."""
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        raise _translated(error, address) from error


def _translated(error: Exception, address: StreamAddress) -> Exception:
    text = str(error) or type(error).__name__
    if any(words in text for words in _TOO_LARGE):
        return RecordError(f"{address}: the broker refuses the record: {text}", "oversize")
    if "WRONGTYPE" in text:
        return StreamError(
            f"{address}: the key holds something else than a stream; choose another stream=NAME"
        )
    if "compiling script" in text:
        return StreamError(f"{address}: needs Redis 7.0 or newer, or Valkey ({text})")
    # What remains is the broker's condition, not the record's: to wait loses less than to refuse.
    return BrokerError(f"{address}: {type(error).__name__}: {text}")


def _options(query: str, tls: bool) -> dict[str, str]:
    found = parse_qs(query, keep_blank_values=True)
    options: dict[str, str] = {}
    for name, values in found.items():
        if name not in ("stream", *_FILES):
            raise _bad(f"option {name} is unknown; there are stream, ca, cert and key")
        if name != "stream" and not tls:
            raise _bad(f"option {name} needs TLS: rediss://")
        if len(values) > 1 or not values[0]:
            raise _bad(f"option {name} needs one value")
        options[name] = values[0]
    if not _STREAM.fullmatch(options.get("stream", "")):
        raise _bad("stream=NAME is missing or not 1 to 200 of A-Z a-z 0-9 _ . : -")
    if "key" in options and "cert" not in options:
        raise _bad("option key needs cert")
    return options


def _bad(problem: str) -> StreamError:
    return StreamError(f"record log URL: {problem} (the form is {_FORM})")
