"""A socket to listen on, and the log on stderr."""

import logging
import socket
import sys

from lmhead.errors import BadInput
from lmhead.serve.api.logs import Lines


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there, or say why not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host.strip("[]"), port))
        made.listen(128)
    except (OSError, OverflowError) as error:
        made.close()
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise BadInput(
            f"cannot listen on {host} port {port} ({why}); choose another host or port",
            names=["host", "port"],
        ) from error
    made.set_inheritable(True)
    return made


def log_to_stderr(level: int = logging.INFO) -> None:
    """Write one line of JSON for every request to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Lines())
    for name in ("lmhead.serve", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
    logging.getLogger("lmhead.serve").setLevel(level)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
