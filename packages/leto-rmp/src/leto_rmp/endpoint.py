"""The manager's place in the file system: a folder of its own, a lock and a socket.

The folder is made first with mode 0700, the socket has mode 0600 from `bind` on, whatever the
caller's umask is. A flock'd file tells a dead manager's socket (replaced) from a living manager's
(refused); the kernel drops the lock with the process, however it dies. Only these two files, and
the folder if this manager made it and it is empty, are ever removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from leto_rmp.errors import ManagerAlive, ManagerStartFailed, RmpError, UnsafeDirectory

__all__ = ["LOCK_NAME", "SOCKET_NAME", "Endpoint", "remove_leftovers", "socket_address"]

SOCKET_NAME = "manager.sock"
_BIND_NAME = "manager.sock.new"  # renamed once it listens: whoever sees the socket can connect
LOCK_NAME = "manager.lock"
_ADDRESS_BYTES_MAX = 107  # sun_path less its terminating zero
_BACKLOG = 128


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address for bind and connect, also where the path is longer than an address may be."""
    if len(os.fsencode(path)) <= _ADDRESS_BYTES_MAX:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _make_folder(folder: Path) -> bool:
    """Make the folder if need be and return whether; raise UnsafeDirectory when others could use it."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        folder.mkdir(mode=0o700)
        made = True
    except FileExistsError:
        made = False
    found = folder.lstat()
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or mode & 0o077:
        raise UnsafeDirectory(
            f"{folder} must be a folder of user {os.geteuid()} with mode 0700; found mode {mode:04o}, owner "
            f"{found.st_uid}. Give the manager a folder of its own"
        )
    return made


def _lock(folder: Path) -> int:
    """Return the fd of the locked lock file; raise ManagerAlive when another process holds it."""
    path = folder / LOCK_NAME
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise ManagerAlive(
                f"{folder} belongs to a living manager (process {holder}): stop it, or use another folder"
            ) from None
        # A manager that was just ending may have removed the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), path.lstat()):
                return fd
        os.close(fd)


def _remove_socket(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise UnsafeDirectory(
            f"{path} is not a socket and not ours to remove: give the manager its own folder"
        )
    path.unlink()


class Endpoint:
    """An open endpoint: lock held, socket listening. `close` removes what `__init__` made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.socket_path = self.folder / SOCKET_NAME
        previous = os.umask(0o077)
        try:
            self._open()
        except RmpError:  # some of them are OSErrors as well
            raise
        except OSError as error:
            raise ManagerStartFailed(
                f"{self.folder} cannot hold the manager's lock and socket: {error.strerror}. Make room "
                "there, or give it another folder"
            ) from error
        finally:
            os.umask(previous)

    def _open(self) -> None:
        self._made_folder = _make_folder(self.folder)
        try:
            self._lock_fd = _lock(self.folder)
        except BaseException:
            if self._made_folder:
                _remove_folder(self.folder)
            raise
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.ftruncate(self._lock_fd, 0)
            os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
            _remove_socket(self.socket_path)  # we hold the lock: whoever bound it is dead
            _remove_socket(self.folder / _BIND_NAME)
            os.umask(0o177)
            with socket_address(self.folder / _BIND_NAME) as address:
                self.listener.bind(address)
            self.listener.listen(_BACKLOG)
            self.listener.setblocking(False)
            (self.folder / _BIND_NAME).rename(self.socket_path)
        except BaseException:
            self._close(_BIND_NAME, LOCK_NAME)
            raise

    def close(self) -> None:
        """Remove our own files, still under the lock, then let it go."""
        self._close(SOCKET_NAME, LOCK_NAME)

    def _close(self, *names: str) -> None:
        self.listener.close()
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        if self._made_folder:
            _remove_folder(self.folder)
        os.close(self._lock_fd)


def _remove_folder(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise


def remove_leftovers(folder: Path, pid: int, *, folder_too: bool) -> bool:
    """Remove what the dead manager `pid` left; return False when the folder belongs to another one.

    A file is only ours when the lock file says so and nobody holds it.
    """
    try:
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        if folder_too:
            _remove_folder(folder)
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.pread(fd, 32, 0).decode(errors="replace").strip() not in ("", str(pid)):
            return False
        for path in (folder / SOCKET_NAME, folder / _BIND_NAME):
            with suppress(FileNotFoundError):
                if stat.S_ISSOCK(path.lstat().st_mode):
                    path.unlink()
        (folder / LOCK_NAME).unlink(missing_ok=True)
        if folder_too:
            _remove_folder(folder)
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True
