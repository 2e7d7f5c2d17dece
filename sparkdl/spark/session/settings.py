"""The entries ``spark.sparkdl.*`` of the session: what belongs to a cluster, not to a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from sparkdl.config import require
from sparkdl.errors import ConfigError

CHANNEL_MODES = ("auto", "driver", "workers")


def _boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.strip().lower() not in values:
        raise ValueError(f"{text!r}; write true or false")
    return values[text.strip().lower()]


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _entry(name: str, convert: Callable[[str], object], default: object) -> Any:
    """The field that ``spark.sparkdl.<name>`` fills."""
    metadata = {"entry": f"spark.sparkdl.{name}", "convert": convert}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time-outs and addresses. Read with `read_settings`."""

    heartbeat_timeout_seconds: float = _entry("heartbeatTimeout", float, 60.0)
    """Silence after which a worker counts as hung, if its process does not use the CPU either."""
    start_timeout_seconds: float = _entry("startTimeout", float, 120.0)
    """Longest wait for executors to register, and for the others once one worker has started."""
    queue_timeout_seconds: float = _entry("queueTimeout", float, 3600.0)
    """Longest wait for slots that other jobs hold, and for other executors after a loss."""
    elastic_wait_seconds: float = _entry("elasticWait", float, 10.0)
    """How long a gang that may have fewer workers waits for the others before it starts, and how
    long new slots must have been there before it starts again with more."""
    cache_bytes: str | None = _entry("cacheBytes", str, None)
    """Size of all spools that are kept in a host's ``cacheDir``, such as 100g; None: a quarter of
    its disk."""
    collective_timeout_seconds: float = _entry("collectiveTimeout", float, 600.0)
    """Longest wait for the peers in one collective."""
    channel: str = _entry("channel", str, "auto")
    """Who hosts it: ``driver``, ``workers``, or ``auto``, the driver unless it is out of reach."""
    channel_port: int = _entry("channel.port", int, 0)
    """Port of the driver's channel; 0 takes a free one."""
    allow_unencrypted: bool = _entry("allowUnencrypted", _boolean, False)
    """Train although Spark encrypts its traffic or files, as gangs and spools do not."""
    trusted_packages: tuple[str, ...] = _entry("trustedPackages", _names, ())
    """Packages whose code saved models may name, with commas between; see `serialization.trust`."""

    def __post_init__(self) -> None:
        is_mode = self.channel in CHANNEL_MODES
        require(is_mode, f"spark.sparkdl.channel must be one of {CHANNEL_MODES}", self.channel)
        for one in fields(self):
            value, rule = getattr(self, one.name), "must be a positive number of seconds"
            if one.name.endswith("_seconds"):
                require(value > 0, f"{one.metadata['entry']} {rule}", value)
        rule = "spark.sparkdl.channel.port must be a port number, or 0 for any"
        require(0 <= self.channel_port < 2**16, rule, self.channel_port)


def read_settings(get: Callable[[str], str | None]) -> Settings:
    """Read the entries; raises ConfigError."""
    values: dict[str, Any] = {}
    for one in fields(Settings):
        entry = one.metadata["entry"]
        if (text := get(entry)) is None:
            continue
        try:
            values[one.name] = one.metadata["convert"](text)
        except ValueError as error:
            raise ConfigError(f"{entry} has a wrong value: {error}") from error
    return Settings(**values)
