"""What a server is told at its start: address, keys, limits and patience. Everything has a bound."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workbench.base import ConfigError, read_small_file
from workbench.serving.http.quotas import Quota

__all__ = ["ServerSettings", "read_api_keys"]

MAX_KEY_FILE_BYTES = 1 << 20
MIN_KEY_LENGTH = 16  # shorter ones can be guessed
ORIGIN = re.compile(r"https?://[a-z0-9.-]+(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """`model` is the name that clients ask for. `api_keys` has the sha256 of each key and its holder; empty: no keys.
    `admin_keys`, of the same form, are for the number of copies alone; empty: nobody changes it.

    Sizes are bytes, times seconds. `max_waiting` requests may wait beyond those that have a slot; the next one is told
    to come back. `requests_per_minute` holds per key (per address where there are no keys), None for no limit.
    `image_origins` are the sites, such as `https://images.example.org`, whose pictures may be fetched; by default only
    pictures inside the request are taken. `quotas` are by holder; whoever has none is bound by what holds for all.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: Mapping[str, str] = field(default_factory=dict)
    admin_keys: Mapping[str, str] = field(default_factory=dict)
    thinking: bool | None = None  # unless a request says so; None: as the service does
    default_max_tokens: int = 1024

    max_waiting: int = 64
    requests_per_minute: int | None = None
    quotas: Mapping[str, Quota] = field(default_factory=dict)
    max_connections: int = 512
    max_body: int = 32 << 20
    max_header: int = 32 << 10
    max_images: int = 16
    max_choices: int = 8
    image_origins: tuple[str, ...] = ()
    prepare_threads: int = 2

    header_timeout_s: float = 10.0  # from the connection, or the last answer on it, to the end of the headers
    body_timeout_s: float = 60.0
    write_timeout_s: float = 30.0  # a reader that takes nothing for so long is cut off
    request_timeout_s: float = 600.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.model or not self.model.isprintable():
            raise ConfigError("the model needs a printable name", found=repr(self.model))
        for name in (
            "default_max_tokens",
            "max_connections",
            "max_body",
            "max_header",
            "max_choices",
            "prepare_threads",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", found=getattr(self, name))
        if min(self.max_waiting, self.max_images) < 0 or not 0 <= self.port < 1 << 16:
            raise ConfigError("a limit is below 0, or the port is none", found=str(self))
        if self.requests_per_minute is not None and self.requests_per_minute < 1:
            raise ConfigError("requests_per_minute must be at least 1", found=self.requests_per_minute)
        times = (self.header_timeout_s, self.body_timeout_s, self.write_timeout_s, self.request_timeout_s)
        if min(times) <= 0 or self.drain_timeout_s < 0:
            raise ConfigError("times must be above 0", found=str(self))
        if set(self.admin_keys) & set(self.api_keys):
            raise ConfigError("a key cannot be both an API key and an admin key", next_step="Use one of its own")
        if strangers := set(self.quotas) - set(self.api_keys.values()):
            raise ConfigError("quotas of holders without a key", found=", ".join(sorted(strangers)))
        for origin in self.image_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(
                    "not the origin of a site", found=repr(origin), expected="such as https://images.example.org"
                )

    def quota_of(self, holder: str) -> Quota:
        return self.quotas.get(holder, Quota())


def read_api_keys(path: Path) -> dict[str, str]:
    """sha256 of each key -> its holder, from a file with one `holder:key` (or just a key) a line; `#` begins a comment.

    Raises ConfigError for a key that is too short, stands twice or holds blanks, and for a file without keys.
    """
    text = read_small_file(path, max_bytes=MAX_KEY_FILE_BYTES, error=ConfigError).decode("utf-8", "replace")
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        holder, _, key = line.rpartition(":")
        key = key.strip()
        # The line itself is a secret: it is never shown.
        if len(key) < MIN_KEY_LENGTH or not key.isascii() or any(c.isspace() for c in key):
            raise ConfigError(
                "not a usable key", where=f"{path}, line {number}", expected=f"{MIN_KEY_LENGTH} or more ASCII letters"
            )
        digest = key_digest(key)
        if digest in keys:
            raise ConfigError("the same key stands twice", where=f"{path}, line {number}")
        keys[digest] = holder.strip() or f"key-{number}"
    if not keys:
        raise ConfigError("no keys", where=path, next_step="Write one `holder:key` a line")
    return keys


def key_digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
