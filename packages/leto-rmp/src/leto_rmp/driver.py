"""The CUDA driver calls that retained memory needs, checked, and in plain numbers.

The package `cuda-bindings` (the extra `cuda`) is imported when the first driver is opened, never before: the
host backend, agents and control clients do without. Addresses, sizes and handles are ints here, errors are
`CudaError` with the driver's own name; only a missing package, driver or device is `CudaUnavailable`.

Physical memory needs no context, so the state manager has none (I-7: its death costs no GPU work). Whoever
touches contents enters the device's *primary* context, the one that torch uses.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from leto_rmp.errors import CudaError, CudaUnavailable, NotEnoughMemory

__all__ = ["UNREADABLE", "Device", "Driver", "open_driver"]

INVALID_VALUE, OUT_OF_MEMORY, STUB_LIBRARY, NO_DEVICE = 1, 2, 34, 100
UNREADABLE = frozenset({214, 226, 700, 719})
"""ECC_UNCORRECTABLE, CONTAINED, ILLEGAL_ADDRESS, LAUNCH_FAILED: what reading a bad page ends in."""
_REGISTER_FLAGS = 0x1 | 0x2  # PORTABLE | DEVICEMAP: every context may use it, kernels too

_READER_PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry leto_read(.param .u64 base, .param .u64 length)
{
    .reg .pred %done;
    .reg .b32 %lane, %block, %width, %grid, %word;
    .reg .b64 %start, %end, %at, %stride, %where;
    ld.param.u64 %start, [base];
    ld.param.u64 %end, [length];
    mov.u32 %lane, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %grid, %nctaid.x;
    mad.lo.u32 %lane, %block, %width, %lane;
    mul.wide.u32 %at, %lane, 32;
    mul.lo.u32 %grid, %grid, %width;
    mul.wide.u32 %stride, %grid, 32;
NEXT:
    setp.ge.u64 %done, %at, %end;
    @%done bra LAST;
    add.u64 %where, %start, %at;
    ld.volatile.global.u32 %word, [%where];
    add.u64 %at, %at, %stride;
    bra NEXT;
LAST:
    ret;
}
\0"""
"""Reads one word of every 32 bytes, the unit that ECC protects; in a kernel, whose errors are contained."""


@dataclass(frozen=True)
class Device:
    """A GPU: its number in *this* process, and the identifier that all processes agree on."""

    ordinal: int
    uuid: str
    name: str


@cache
def open_driver() -> Driver:
    """Return this process's driver; raise CudaUnavailable where there is none."""
    return Driver()


class Driver:
    """An initialised driver. Thread-safe as the driver itself is."""

    def __init__(self) -> None:
        try:
            from cuda.bindings import driver as api
        except ImportError as error:
            raise CudaUnavailable(
                f"the cuda backend needs the package cuda-bindings: install leto-rmp[cuda] ({error})"
            ) from error
        self._api: Any = api
        try:
            code = api.cuInit(0)[0]
        except RuntimeError as error:  # the bindings load libcuda at the first call
            raise CudaUnavailable(f"no CUDA driver on this machine: {error}") from error
        if int(code) in (STUB_LIBRARY, NO_DEVICE):
            raise CudaUnavailable(f"the CUDA driver finds no device: cuInit returned {code.name}")
        self._check((code,), "cuInit")
        self._fd_type = api.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._memory_type = api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        self._properties: dict[int, Any] = {}
        self._contexts: dict[int, Any] = {}
        self._readers: dict[int, Any] = {}

    def _check(self, result: tuple[Any, ...], call: str) -> Any:
        """Return the call's value, if it has one; raise CudaError with the driver's name for the failure."""
        code = int(result[0])
        if code:
            name = getattr(result[0], "name", str(code))
            if code == OUT_OF_MEMORY:
                raise NotEnoughMemory(f"{call}: the GPU is out of memory ({name})", code=code)
            raise CudaError(f"{call} failed: {name} ({code})", code=code, call=call)
        return result[1] if len(result) > 1 else None

    # -- devices -------------------------------------------------------------------------------

    def device(self, ordinal: int) -> Device:
        """Return the device with this number among those visible to this process."""
        count = int(self._check(self._api.cuDeviceGetCount(), "cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise CudaUnavailable(
                f"there is no device {ordinal}: {count} visible here (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')!r})"
            )
        device = self._check(self._api.cuDeviceGet(ordinal), "cuDeviceGet")
        raw = bytes(self._check(self._api.cuDeviceGetUuid(device), "cuDeviceGetUuid").bytes)
        name = bytes(self._check(self._api.cuDeviceGetName(128, device), "cuDeviceGetName"))
        return Device(ordinal, f"GPU-{uuid.UUID(bytes=raw[:16])}", name.split(b"\0")[0].decode())

    def find(self, device_uuid: str) -> Device:
        """Return the device of this identifier; processes may number their devices differently."""
        count = int(self._check(self._api.cuDeviceGetCount(), "cuDeviceGetCount"))
        for ordinal in range(count):
            device = self.device(ordinal)
            if device.uuid == device_uuid:
                return device
        raise CudaUnavailable(
            f"the pool's memory is on {device_uuid}, which is not among the {count} devices visible here: "
            "set CUDA_VISIBLE_DEVICES as for the state manager"
        )

    def _property(self, ordinal: int) -> Any:
        if ordinal not in self._properties:
            api = self._api
            found = api.CUmemAllocationProp()
            found.type = api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            found.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            found.location.id = ordinal
            found.requestedHandleTypes = self._fd_type
            self._properties[ordinal] = found
        return self._properties[ordinal]

    def granularity(self, ordinal: int) -> int:
        """Return the unit of physical memory, in bytes."""
        least = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        result = self._api.cuMemGetAllocationGranularity(self._property(ordinal), least)
        return int(self._check(result, "cuMemGetAllocationGranularity"))

    # -- physical memory: no context -----------------------------------------------------------

    def create(self, ordinal: int, nbytes: int) -> int:
        """Allocate physical memory, with undefined contents; return its handle. Raises NotEnoughMemory."""
        return int(self._check(self._api.cuMemCreate(nbytes, self._property(ordinal), 0), "cuMemCreate"))

    def export(self, handle: int) -> int:
        """Return a close-on-exec file descriptor that keeps the memory alive by itself."""
        result = self._api.cuMemExportToShareableHandle(handle, self._fd_type, 0)
        fd = int(self._check(result, "cuMemExportToShareableHandle"))
        os.set_inheritable(fd, False)
        return fd

    def release(self, handle: int) -> None:
        """Let go of a handle; the memory lives on in file descriptors and mappings."""
        self._check(self._api.cuMemRelease(handle), "cuMemRelease")

    # -- addresses -----------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses; return the first."""
        return int(self._check(self._api.cuMemAddressReserve(nbytes, 0, 0, 0), "cuMemAddressReserve"))

    def free_addresses(self, address: int, nbytes: int) -> None:
        """Give reserved addresses back; nothing is mapped there any more."""
        self._check(self._api.cuMemAddressFree(address, nbytes), "cuMemAddressFree")

    def map_fd(self, address: int, nbytes: int, fd: int) -> None:
        """Map the memory behind a descriptor, which may be closed afterwards; not yet accessible."""
        api = self._api
        handle = self._check(
            api.cuMemImportFromShareableHandle(fd, self._fd_type), "cuMemImportFromShareableHandle"
        )
        try:
            self._check(api.cuMemMap(address, nbytes, 0, handle, 0), "cuMemMap")
        finally:
            api.cuMemRelease(handle)  # the mapping holds the memory from here on

    def unmap(self, address: int, nbytes: int) -> None:
        """Unmap whole pages; their physical memory is freed when nobody else has it."""
        self._check(self._api.cuMemUnmap(address, nbytes), "cuMemUnmap")

    def set_access(self, ordinal: int, address: int, nbytes: int, writable: bool) -> None:
        """Make mapped pages accessible to the device, for reading or for both."""
        api = self._api
        flags = api.CUmemAccess_flags
        access = api.CUmemAccessDesc()
        access.location.type = api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        self._check(api.cuMemSetAccess(address, nbytes, [access], 1), "cuMemSetAccess")

    def is_mapped(self, address: int) -> bool:
        """Ask the driver whether memory is mapped at this device address."""
        result = self._api.cuPointerGetAttribute(self._memory_type, address)
        if int(result[0]) == INVALID_VALUE:
            return False
        self._check(result, "cuPointerGetAttribute")
        return True

    # -- contents: inside a context ------------------------------------------------------------

    @contextmanager
    def context(self, ordinal: int) -> Iterator[None]:
        """Make the device's primary context current for the calling thread; it is created if need be."""
        api = self._api
        if ordinal not in self._contexts:
            device = self._check(api.cuDeviceGet(ordinal), "cuDeviceGet")
            self._contexts[ordinal] = self._check(
                api.cuDevicePrimaryCtxRetain(device), "cuDevicePrimaryCtxRetain"
            )
        self._check(api.cuCtxPushCurrent(self._contexts[ordinal]), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._check(api.cuCtxPopCurrent(), "cuCtxPopCurrent")

    def drain(self, ordinal: int) -> None:
        """Wait for all work of this process in the primary context, if there is such a context."""
        device = self._check(self._api.cuDeviceGet(ordinal), "cuDeviceGet")
        result = self._api.cuDevicePrimaryCtxGetState(device)
        self._check(result[:1], "cuDevicePrimaryCtxGetState")
        if int(result[2]):
            with self.context(ordinal):
                self.synchronize()

    def synchronize(self) -> None:
        """Wait until all work of the current context is done; raise what it failed with."""
        self._check(self._api.cuCtxSynchronize(), "cuCtxSynchronize")

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros, in the order of the default stream."""
        self._check(self._api.cuMemsetD8(address, 0, nbytes), "cuMemsetD8")

    def read(self, address: int, nbytes: int) -> bytes:
        """Copy from the device."""
        data = bytearray(nbytes)
        where = ctypes.addressof(ctypes.c_char.from_buffer(data))
        self._check(self._api.cuMemcpyDtoH(where, address, nbytes), "cuMemcpyDtoH")
        return bytes(data)

    def write(self, address: int, data: bytes) -> None:
        """Copy to the device."""
        source = ctypes.create_string_buffer(data, len(data))
        self._check(self._api.cuMemcpyHtoD(address, ctypes.addressof(source), len(data)), "cuMemcpyHtoD")
        self.synchronize()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy on the device, and wait."""
        self._check(self._api.cuMemcpyDtoD(target, source, nbytes), "cuMemcpyDtoD")
        self.synchronize()

    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes of the current context's device."""
        result = self._api.cuMemGetInfo()
        self._check(result[:1], "cuMemGetInfo")
        return int(result[1]), int(result[2])

    def touch(self, ordinal: int, address: int, nbytes: int) -> None:
        """Read one word of every 32 bytes on the device, and wait. An unreadable page kills the context."""
        api = self._api
        if ordinal not in self._readers:
            module = self._check(api.cuModuleLoadData(_READER_PTX), "cuModuleLoadData")
            self._readers[ordinal] = self._check(
                api.cuModuleGetFunction(module, b"leto_read"), "cuModuleGetFunction"
            )
        arguments = ((address, nbytes), (ctypes.c_uint64, ctypes.c_uint64))
        blocks = max(1, min(1024, nbytes // (32 * 256)))
        self._check(
            api.cuLaunchKernel(self._readers[ordinal], blocks, 1, 1, 256, 1, 1, 0, 0, arguments, 0),
            "cuLaunchKernel",
        )
        self.synchronize()

    # -- host memory ---------------------------------------------------------------------------

    def host_register(self, address: int, nbytes: int) -> str:
        """Pin host memory for the current context; return "" or the name of what went wrong."""
        code = self._api.cuMemHostRegister(address, nbytes, _REGISTER_FLAGS)[0]
        return "" if int(code) == 0 else str(getattr(code, "name", int(code)))

    def host_unregister(self, address: int) -> str:
        """Undo `host_register`; return "" or the name of what went wrong."""
        code = self._api.cuMemHostUnregister(address)[0]
        return "" if int(code) == 0 else str(getattr(code, "name", int(code)))
