"""What `leto doctor` asks the machine, one method per question.

Role: the seam of the doctor. Checks (`leto_shadow.checks`) judge answers; this class gets them, by trying
harmless calls. Tests replace single answers to simulate machines that they do not run on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import resource
import socket
import sys
import tempfile
from pathlib import Path

from leto_shadow import oom_hook, room
from leto_shadow.nvml import Gpu

__all__ = ["Machine"]

_SO_PEERPIDFD = 77
_MADV_POPULATE_READ = 22
_PR_GET_PDEATHSIG = 2


class Machine:
    """The machine that this process runs on. Methods that try something return None if it works, else the
    reason."""

    def python(self) -> tuple[int, int]:
        """Major and minor version of this interpreter."""
        return sys.version_info[:2]

    def system(self) -> str:
        """Name of the operating system."""
        return platform.system()

    def kernel(self) -> str:
        """Release of the kernel."""
        return platform.release()

    def cores(self) -> int:
        """CPU cores that this process may use."""
        return len(os.sched_getaffinity(0))

    def read(self, path: str) -> str | None:
        """Text of a small file of /proc or /sys; None if it cannot be read."""
        try:
            return Path(path).read_text()
        except (OSError, UnicodeDecodeError):
            return None

    def open_files(self) -> tuple[int, int]:
        """Soft and hard RLIMIT_NOFILE; -1 is no limit."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)

    def try_pidfd(self) -> str | None:
        """Open a pidfd of this process."""
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError as error:
            return error.strerror
        return None

    def try_memfd(self) -> str | None:
        """Create a memfd, reserve a page and punch a hole into it, as page remapping does."""
        try:
            fd = os.memfd_create("leto-doctor", os.MFD_CLOEXEC)
        except OSError as error:
            return error.strerror
        try:
            os.posix_fallocate(fd, 0, 2 * mmap.PAGESIZE)
            libc = ctypes.CDLL(None, use_errno=True)
            keep_size_punch_hole = 0x01 | 0x02
            offset, length = ctypes.c_int64(mmap.PAGESIZE), ctypes.c_int64(mmap.PAGESIZE)
            if libc.fallocate(fd, keep_size_punch_hole, offset, length) != 0:
                return f"punching a hole: {os.strerror(ctypes.get_errno())}"
        except OSError as error:
            return f"reserving a page: {error.strerror}"
        finally:
            os.close(fd)
        return None

    def try_populate_read(self) -> str | None:
        """Populate a mapping by MADV_POPULATE_READ, the call that finds unreadable pages."""
        with mmap.mmap(-1, mmap.PAGESIZE) as mapping:
            try:
                mapping.madvise(_MADV_POPULATE_READ)
            except OSError as error:
                return error.strerror
        return None

    def try_poison(self) -> str | None:
        """Open a userfaultfd with UFFDIO_POISON, as the state manager does."""
        from leto_rmp.uffd import Poisoner, PoisonUnavailable

        try:
            Poisoner().close()
        except PoisonUnavailable as error:
            return str(error)
        return None

    def try_peer_pidfd(self) -> str | None:
        """Ask a socket for its peer's pidfd."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            try:
                os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
            except OSError as error:
                return error.strerror
        return None

    def try_death_signal(self) -> str | None:
        """Ask for the parent-death signal, without changing it."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int()), 0, 0, 0) != 0:
            return os.strerror(ctypes.get_errno())
        return None

    def try_loopback(self) -> str | None:
        """Bind a TCP port on the loopback interface."""
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
                sock.bind(("127.0.0.1", 0))
        except OSError as error:
            return error.strerror
        return None

    def temp_dir(self) -> str:
        """Folder for temporary files."""
        return tempfile.gettempdir()

    def try_write(self, folder: str) -> str | None:
        """Make and remove a socket in `folder`."""
        path = os.path.join(folder, f".leto-doctor-{os.getpid()}")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.bind(path)
        except OSError as error:
            return error.strerror or str(error)
        finally:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
        return None

    def version(self, distribution: str) -> str | None:
        """Version of an installed distribution; None if it is not installed."""
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return None

    def importable(self, module: str) -> bool:
        """Whether a module can be found."""
        try:
            return importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # a parent of it is missing
            return False

    def torch_features(self) -> tuple[bool, bool]:
        """Whether torch has torch.distributed, and gloo in it."""
        import torch.distributed as dist

        available = dist.is_available()
        return available, available and dist.is_gloo_available()

    def ec_info(self) -> dict[str, object] | None:
        """What leto_ec says about its kernels; None if it is not installed."""
        if not self.importable("leto_ec"):
            return None
        import leto_ec

        return dict(leto_ec.info())

    def gpu_devices(self) -> list[str]:
        """Device nodes of NVIDIA GPUs."""
        return sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))

    def try_gpus(self) -> str | None:
        """Have another process ask the driver for its devices, within a deadline."""
        from leto_shadow.gpu import WatchError, list_gpus

        try:
            list_gpus()
        except WatchError as error:
            return str(error)
        return None

    def gpus(self) -> tuple[Gpu, ...]:
        """What the driver says of its devices; nothing if it does not answer."""
        from leto_shadow.gpu import WatchError, list_gpus

        try:
            return list_gpus()
        except WatchError:
            return ()

    def file_bytes(self) -> int | None:
        """RLIMIT_FSIZE, which bounds memfds as well; None if there is no limit."""
        return room.file_limit()

    def try_oom_hook(self) -> str | None:
        """Load the allocator hook and ask for its version."""
        if (reason := oom_hook.unavailable()) is not None:
            return reason
        try:
            ctypes.CDLL(str(oom_hook.LIBRARY)).leto_oom_version()
        except (OSError, AttributeError) as error:
            return f"{oom_hook.LIBRARY.name} cannot be loaded: {error}"
        return None

    def memory(self) -> tuple[int, str]:
        """Bytes that can still be allocated, and what sets that bound."""
        from leto_rmp.memory import available

        budget = available()
        return budget.available_bytes, budget.source
