"""Key files: who may talk to a learner that other machines can reach.

    DIR/server.key     the learner's pair                                             stays with the learner
    DIR/allowed        a line per client: its public key, a space, its name           stays with the learner
    DIR/NAME.key       one client's pair and the server's public key                  all that a generator needs

All are JSON or text of mode 0600 in a folder of mode 0700. Keys are Curve25519 in Z85, 40 characters. Taking a
line out of `allowed` shuts that client out at its next connection, without a restart.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from headway.errors import StreamError

SERVER = "server.key"
ALLOWED = "allowed"
DEFAULT_CLIENT = "generator"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_Z85 = re.compile(r"[0-9A-Za-z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")


class ServerKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of server.key."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ServerKeys(public={self.public!r})"


class ClientKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a client's file: its own pair, and the only server that it talks to."""

    name: str
    server: str
    public: str
    secret: str

    def __repr__(self) -> str:
        return f"ClientKeys(name={self.name!r}, public={self.public!r}, server={self.server!r})"


_Keys = TypeVar("_Keys", ServerKeys, ClientKeys)


def new_keys(folder: Path, names: Iterable[str] = (DEFAULT_CLIENT,)) -> list[Path]:
    """Make a server's keys, unless the folder has them, and those of new clients.

    Args:
        folder: made when missing.
        names: of the clients; each is entered in `allowed`.

    Returns:
        The files made.

    Raises:
        StreamError: a name that cannot be a file's, a client that exists, or a folder that others can enter.
    """
    names = list(names)
    for name in names:
        if not _NAME.fullmatch(name) or f"{name}.key" == SERVER:
            raise StreamError(
                f"got client name {name[:80]!r}; expected 1 to 64 of A-Z a-z 0-9 . _ - (not server)"
            )
        if (folder / f"{name}.key").exists():
            raise StreamError(
                f"{folder / name}.key exists; choose another name, or delete it to make it anew"
            )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_private(folder)
    made: list[Path] = []
    if not (folder / SERVER).exists():
        made.append(_write(folder / SERVER, msgspec.json.format(msgspec.json.encode(ServerKeys(*_pair())))))
    server = read_server_keys(folder)
    for name in names:
        public, secret = _pair()
        keys = ClientKeys(name, server.public, public, secret)
        made.append(_write(folder / f"{name}.key", msgspec.json.format(msgspec.json.encode(keys))))
        _allow(folder / ALLOWED, f"{public} {name}\n")
    return made


def _pair() -> tuple[str, str]:
    while True:
        public, secret = (key.decode() for key in zmq.curve_keypair())
        if not public.startswith("#"):  # which would make its line in `allowed` a comment
            return public, secret


def _write(path: Path, content: bytes) -> Path:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content + b"\n")
    return path


def _allow(path: Path, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "a", encoding="ascii") as file:
        file.write(line)


def read_server_keys(folder: Path) -> ServerKeys:
    """The server's pair.

    Raises:
        StreamError: missing, unreadable, or open to other users.
    """
    path = folder / SERVER
    keys = _read(path, ServerKeys)
    _check_z85(path, keys.public, keys.secret)
    return keys


def read_client_keys(path: Path) -> ClientKeys:
    """One client's keys.

    Raises:
        StreamError: missing, unreadable, or open to other users.
    """
    keys = _read(path, ClientKeys)
    _check_z85(path, keys.server, keys.public, keys.secret)
    return keys


def read_allowed(folder: Path) -> dict[str, str]:
    """Names of the clients that may connect, by public key. Empty lines and those that start with # are skipped.

    Raises:
        StreamError: missing, or a line is no key.
    """
    path = folder / ALLOWED
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise StreamError(f"cannot read the list of allowed clients {path}: {error}") from None
    clients: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        key, _, name = line.strip().partition(" ")
        if not _Z85.fullmatch(key):
            raise StreamError(
                f"{path}, line {number}: expected PUBLIC_KEY NAME, a key of 40 characters of Z85"
            )
        clients[key] = name.strip() or key[:8]
    return clients


def _read(path: Path, kind: type[_Keys]) -> _Keys:
    if not path.exists():
        raise StreamError(f"there is no key file {path}; make one with `headway keys new`")
    _check_private(path)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        # The error of a decoder may quote what it read: not in a message about secrets.
        raise StreamError(f"{path} is no key file of headway ({type(error).__name__})") from None


def _check_z85(path: Path, *keys: str) -> None:
    if not all(_Z85.fullmatch(key) for key in keys):
        raise StreamError(f"{path}: a key is not 40 characters of Z85; make it anew with `headway keys new`")


def _check_private(path: Path) -> None:
    mode = path.stat().st_mode
    if mode & 0o077:
        raise StreamError(
            f"{path} has mode {stat.S_IMODE(mode):04o}: other users can reach it. chmod "
            f"{'700' if stat.S_ISDIR(mode) else '600'} it, and make new keys if they may have read it"
        )
