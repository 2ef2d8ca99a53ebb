"""NVML through ctypes: what a GPU says of itself, without a CUDA context.

Role: `Nvml` is used only inside the watch process (`leto_shadow.gpu_watch`), because a call into a sick
driver may never return; the agent knows the answers' types alone.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import msgspec

__all__ = ["Gpu", "Look", "Memory", "Nvml", "NvmlError"]

_NAME_BYTES = 96
_PROCESSES = 512
_INSUFFICIENT_SIZE = 7
_TIMEOUT = 10
_XID_EVENTS = 0x8 | 0x2  # critical Xid errors, double-bit ECC errors
_EVENT_WAIT_MS = 1000
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE = 0  # counted since the driver was loaded
_RECOVERY_ACTION = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION


class NvmlError(RuntimeError):
    """NVML is missing, or one of its calls failed."""


class Gpu(msgspec.Struct, frozen=True):
    """One device of the machine."""

    uuid: str
    name: str
    total_bytes: int


class Look(msgspec.Struct, frozen=True):
    """What a device says now. ``processes``: pid -> bytes; None where the driver does not tell.

    ``xids``: errors that the driver reported since the watch began, oldest first. ``remap_failed``: a bad row
    of memory could not be replaced by a spare one; ``remap_pending``, ``retirement_pending``: one will be, at
    the next reset. ``ecc_corrected``, ``ecc_uncorrected``: errors since the driver was loaded.
    """

    free_bytes: int
    total_bytes: int
    processes: dict[int, int] | None = None
    xids: tuple[int, ...] = ()
    remap_failed: bool = False
    remap_pending: bool = False
    retirement_pending: bool = False
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    recovery: int | None = None
    """NVML's recovery action; None where the driver does not tell."""


class Memory(msgspec.Struct, frozen=True):
    """The part of a `Look` that says how much memory is free, and who holds the rest."""

    free_bytes: int
    processes: dict[int, int] | None = None


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class _Field(ctypes.Structure):
    """nvmlFieldValue_t; the value is a union of eight bytes, whose first four are an unsigned int."""

    _fields_ = [
        ("field", ctypes.c_uint),
        ("scope", ctypes.c_uint),
        ("timestamp", ctypes.c_longlong),
        ("latency_us", ctypes.c_longlong),
        ("value_type", ctypes.c_uint),
        ("status", ctypes.c_uint),
        ("value", ctypes.c_uint),
        ("rest", ctypes.c_uint),
    ]


class _Event(ctypes.Structure):
    _fields_ = [
        ("device", ctypes.c_void_p),
        ("kind", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The library, initialised. Raises NvmlError where there is none, or no driver behind it.

    Several threads may ask at once, as NVML allows.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            raise NvmlError(
                f"libnvidia-ml.so.1, which comes with NVIDIA's driver, is not here: {error}"
            ) from error
        self._library.nvmlErrorString.restype = ctypes.c_char_p
        self._call("nvmlInit_v2")
        self._xids: dict[str, list[int]] = {}
        self._lock = threading.Lock()
        self._devices: dict[str, ctypes.c_void_p] = {}

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = self._library.nvmlErrorString(status)
            raise NvmlError(f"{name}: {text.decode() if text else status}")

    def gpus(self) -> list[Gpu]:
        """Return the devices of the machine, in NVML's order."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
            name = ctypes.create_string_buffer(_NAME_BYTES)
            self._call("nvmlDeviceGetName", device, name, ctypes.c_uint(_NAME_BYTES))
            found.append(Gpu(self._uuid(device), name.value.decode(), self._memory(device).total))
        return found

    def look(self, uuid: str) -> Look:
        """Ask one device; raises NvmlError when it does not answer as a healthy one does."""
        device = self._device(uuid)
        memory = self._memory(device)
        with self._lock:
            xids = tuple(self._xids.get(uuid, ()))
        pending, failed = self._remapping(device)
        return Look(
            memory.free,
            memory.total,
            self._processes(device),
            xids,
            remap_failed=failed,
            remap_pending=pending,
            retirement_pending=self._retirement_pending(device),
            ecc_corrected=self._ecc(device, _CORRECTED),
            ecc_uncorrected=self._ecc(device, _UNCORRECTED),
            recovery=self._recovery(device),
        )

    def memory(self, uuid: str) -> Memory:
        """Ask one device for its memory alone: two calls instead of the seven of `look`."""
        device = self._device(uuid)
        return Memory(self._memory(device).free, self._processes(device))

    def listen(self) -> None:
        """Collect Xid errors from now on, in a thread; drivers that report none are left alone."""
        events = ctypes.c_void_p()
        self._call("nvmlEventSetCreate", ctypes.byref(events))
        for gpu in self.gpus():
            try:
                self._call(
                    "nvmlDeviceRegisterEvents",
                    self._device(gpu.uuid),
                    ctypes.c_ulonglong(_XID_EVENTS),
                    events,
                )
            except NvmlError:
                continue  # not supported by this device
        threading.Thread(target=self._collect, args=(events,), name="leto-xid", daemon=True).start()

    def _collect(self, events: ctypes.c_void_p) -> None:
        event = _Event()
        while True:
            status = self._library.nvmlEventSetWait_v2(
                events, ctypes.byref(event), ctypes.c_uint(_EVENT_WAIT_MS)
            )
            if status == _TIMEOUT:
                continue
            if status:
                return
            uuid = self._uuid(ctypes.c_void_p(event.device))
            with self._lock:
                self._xids.setdefault(uuid, []).append(int(event.data))

    def _device(self, uuid: str) -> ctypes.c_void_p:
        """The handle, which stays valid: on one of a device that was lost every other call fails."""
        device = self._devices.get(uuid)
        if device is None:
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
            self._devices[uuid] = device
        return device

    def _uuid(self, device: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(_NAME_BYTES)
        self._call("nvmlDeviceGetUUID", device, text, ctypes.c_uint(_NAME_BYTES))
        return text.value.decode()

    def _memory(self, device: ctypes.c_void_p) -> _Memory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", device, ctypes.byref(memory))
        return memory

    def _processes(self, device: ctypes.c_void_p) -> dict[int, int] | None:
        count = ctypes.c_uint(_PROCESSES)
        found = (_Process * _PROCESSES)()
        try:
            self._call("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), found)
        except (NvmlError, AttributeError):  # a driver older than this call
            return None
        unknown = (1 << 64) - 1
        return {p.pid: 0 if p.used == unknown else p.used for p in found[: count.value]}

    def _ecc(self, device: ctypes.c_void_p, kind: int) -> int | None:
        count = ctypes.c_ulonglong()
        try:
            self._call(
                "nvmlDeviceGetTotalEccErrors",
                device,
                ctypes.c_uint(kind),
                ctypes.c_uint(_VOLATILE),
                ctypes.byref(count),
            )
        except (NvmlError, AttributeError):
            return None  # a device without ECC, or with ECC switched off
        return int(count.value)

    def _retirement_pending(self, device: ctypes.c_void_p) -> bool:
        pending = ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetRetiredPagesPendingStatus", device, ctypes.byref(pending))
        except (NvmlError, AttributeError):
            return False  # a device that remaps rows instead
        return bool(pending.value)

    def _remapping(self, device: ctypes.c_void_p) -> tuple[bool, bool]:
        """Whether remappings are pending, and whether one has ever failed."""
        values = [ctypes.c_uint() for _ in range(4)]
        try:
            self._call("nvmlDeviceGetRemappedRows", device, *map(ctypes.byref, values))
        except (NvmlError, AttributeError):
            return False, False  # a device without row remapping
        return bool(values[2].value), bool(values[3].value)

    def _recovery(self, device: ctypes.c_void_p) -> int | None:
        field = _Field(_RECOVERY_ACTION)
        try:
            self._call("nvmlDeviceGetFieldValues", device, ctypes.c_int(1), ctypes.byref(field))
        except (NvmlError, AttributeError):
            return None
        return None if field.status else int(field.value)
