"""What a server allows: its limits, its key, and where it may be reached from."""

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from lmhead.errors import BadInput


@dataclass(frozen=True)
class Settings:
    """The limits of a server. Sizes are in bytes, times in seconds."""

    key: str | None = None  # what a client must show; None: nothing
    origins: tuple[str, ...] = ()  # pages of these origins may ask (CORS)
    hosts: tuple[str, ...] | None = None  # names a client may call us by; None: any
    vectors: Path | None = None  # where steering vectors are, and uploaded ones go
    max_body: int = 4 * 2**20
    max_vector: int = 64 * 2**20  # of an uploaded vector
    max_vectors: int = 64  # that are held at once
    max_tokens: int = 4096  # that one choice may have
    max_prompts: int = 64  # of one request, times n
    max_logprobs: int = 100
    max_stop: int = 16
    max_connections: int = 256
    body_time: float = 30.0  # to send a request
    time: float = 600.0  # to answer one
    drain: float = 30.0  # to finish what runs when the server is told to end
    log_prompts: bool = False


LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_exposed(host: str, key: str | None) -> None:
    """Refuse to be reached from elsewhere without a key."""
    if not is_loopback(host) and not key:
        raise BadInput(
            f"host is {host}, which other machines can reach, and there is no key; put a key into "
            "an environment variable and name it with api_key_env, or listen on 127.0.0.1",
            names=["host", "api_key_env"],
        )


def check_key(key: str, name: str) -> None:
    """Refuse a key that is easy to guess, or that a header cannot carry."""
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(
            f"the key in ${name} has {len(key)} characters; expected at least 8 printable ASCII "
            "characters without spaces"
        )
