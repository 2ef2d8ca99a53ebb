"""A FAKE of `cuda.bindings.driver`: "GPU memory" is memfds, "device addresses" are addresses of the process.

Put this folder on PYTHONPATH and managers, clients and helper processes run without a GPU: descriptors are
passed, mapped, killed and counted for real, by the same product code. What it cannot show: anything of the
real driver's behaviour. It refuses what the driver was seen to refuse (unmapping part of a mapping, access to
a hole, importing what is no memory), fills new memory with junk, and a page that begins with `FAKE-ECC` kills
the context of whoever touches it, for good, with error 226.
"""

# ruff: noqa: N801, N802 - the names are the driver's
from __future__ import annotations

import ctypes
import mmap
import os
from enum import IntEnum

JUNK = 0xDB
ECC = b"FAKE-ECC"
PAGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_CONTAINED = 226
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_NOT_SUPPORTED = 801


OK, INVALID = CUresult.CUDA_SUCCESS, CUresult.CUDA_ERROR_INVALID_VALUE


class CUmemAllocationHandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1


class CUpointer_attribute(IntEnum):
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2


class CUmemAllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationGranularity_flags(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class _Location:
    type = None
    id = 0


class CUmemAllocationProp:
    def __init__(self) -> None:
        self.location = _Location()


class CUmemAccessDesc:
    def __init__(self) -> None:
        self.location = _Location()


class CUuuid:
    bytes = bytes(range(16))


handles: dict[int, int] = {}  # handle -> memfd
reserved: dict[int, int] = {}  # address -> length
mapped: dict[int, int] = {}  # address -> length
access: dict[int, int] = {}  # address -> flags
registered: dict[int, int] = {}
calls: list[str] = []
_next = [1]
_contexts: list[object] = []
_state = {"dead": OK, "retained": False}


def _budget() -> int:
    return int(os.environ.get("FAKE_CUDA_PAGES", "100000"))


def _held() -> int:
    """Pages behind the descriptors of memory that this process holds."""
    if "FAKE_CUDA_PAGES" not in os.environ:
        return len(handles)
    with os.scandir("/proc/self/fd") as entries:
        held = [os.stat(one.path).st_size for one in entries if "fake-gpu" in os.readlink(one.path)]
    return sum(held) // PAGE


def cuInit(flags):
    return (CUresult.CUDA_ERROR_NO_DEVICE if os.environ.get("FAKE_CUDA_NO_DEVICE") else OK,)


def cuDeviceGetCount():
    return OK, 1


def cuDeviceGet(ordinal):
    return OK, ordinal


def cuDeviceGetUuid(device):
    return OK, CUuuid()


def cuDeviceGetName(length, device):
    return OK, b"Fake GPU\0" + bytes(length - 9)


def cuMemGetAllocationGranularity(prop, flag):
    return OK, PAGE


def _new(fd):
    handle = _next[0]
    _next[0] += 1
    handles[handle] = fd
    return handle


def cuMemCreate(size, prop, flags):
    if _held() + size // PAGE > _budget():
        return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
    fd = os.memfd_create("fake-gpu", os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    os.pwrite(fd, bytes([JUNK]) * 4096, 0)
    return OK, _new(fd)


def cuMemExportToShareableHandle(handle, kind, flags):
    fd = os.dup(handles[int(handle)])
    os.set_inheritable(fd, True)  # whoever exports has to set close-on-exec
    return OK, fd


def cuMemImportFromShareableHandle(fd, kind):
    if "fake-gpu" not in os.readlink(f"/proc/self/fd/{fd}"):
        return INVALID, None
    return OK, _new(os.dup(fd))


def cuMemRelease(handle):
    os.close(handles.pop(int(handle)))
    return (OK,)


def cuMemAddressReserve(size, alignment, address, flags):
    where = _libc.mmap(None, size, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000, -1, 0)
    reserved[where] = size
    return OK, where


def cuMemAddressFree(address, size):
    if reserved.get(address) != size or any(address <= a < address + size for a in mapped):
        return (INVALID,)
    del reserved[address]
    _libc.munmap(address, size)
    return (OK,)


def cuMemMap(address, size, offset, handle, flags):
    calls.append("map")
    if (
        address in mapped
        or offset
        or not any(a <= address and address + size <= a + n for a, n in reserved.items())
    ):
        return (INVALID,)
    _libc.mmap(address, size, 0, mmap.MAP_SHARED | 0x10, handles[int(handle)], 0)
    mapped[address] = size
    return (OK,)


def _inside(address, size):
    """Return the mappings that fill the range exactly, None when it is not whole mappings without a hole."""
    found, at = [], address
    while at < address + size:
        if at not in mapped:
            return None
        found.append(at)
        at += mapped[at]
    return found if at == address + size else None


def cuMemUnmap(address, size):
    calls.append("unmap")
    found = _inside(address, size)
    if not found:
        return (INVALID,)
    for at in found:
        _libc.mmap(at, mapped[at], 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4010, -1, 0)
        del mapped[at]
        access.pop(at, None)
    return (OK,)


def cuMemSetAccess(address, size, descriptions, count):
    calls.append("access")
    flags = int(descriptions[0].flags)
    if flags == 1 and os.environ.get("FAKE_CUDA_NO_READ_ONLY"):
        return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
    found = _inside(address, size)
    if not found:
        return (INVALID,)
    _libc.mprotect(address, size, mmap.PROT_READ | (mmap.PROT_WRITE if flags == 3 else 0))
    access.update(dict.fromkeys(found, flags))
    return (OK,)


def cuPointerGetAttribute(attribute, address):
    return (OK, 2) if any(a <= address < a + n for a, n in mapped.items()) else (INVALID, None)


def cuDevicePrimaryCtxGetState(device):
    return OK, 0, int(_state["retained"])


def cuDevicePrimaryCtxRetain(device):
    _state["retained"] = True
    return OK, "context"


def cuCtxPushCurrent(context):
    _contexts.append(context)
    return (OK,)


def cuCtxPopCurrent():
    return OK, _contexts.pop()


def cuCtxSynchronize():
    return (_state["dead"],)


def _usable(address, size, writing):
    if _state["dead"] != OK:
        return _state["dead"]
    at = address - address % PAGE
    while at < address + size:
        if not any(a <= at < a + mapped[a] and access.get(a, 0) & (2 if writing else 1) for a in mapped):
            return INVALID
        at += PAGE
    return OK


def cuMemsetD8(address, value, size):
    code = _usable(address, size, True)
    if code == OK:
        ctypes.memset(address, value, size)
    return (code,)


def cuMemcpyDtoH(to, address, size):
    code = _usable(address, size, False)
    if code == OK:
        ctypes.memmove(to, address, size)
    return (code,)


def cuMemcpyHtoD(address, source, size):
    code = _usable(address, size, True)
    if code == OK:
        ctypes.memmove(address, source, size)
    return (code,)


def cuMemcpyDtoD(to, source, size):
    code = _usable(source, size, False) or _usable(to, size, True)
    if code == OK:
        for at in range(source, source + size, PAGE):
            if ctypes.string_at(at, len(ECC)) == ECC:
                _state["dead"] = CUresult.CUDA_ERROR_CONTAINED
                return (OK,)  # the error comes with the next synchronization
        ctypes.memmove(to, source, size)
    return (code,)


def cuMemGetInfo():
    free = (_budget() - _held()) * PAGE
    return OK, free, _budget() * PAGE


def cuModuleLoadData(image):
    return (OK, "module") if b"leto_read" in image and image.endswith(b"\0") else (INVALID, None)


def cuModuleGetFunction(module, name):
    return OK, name


def cuLaunchKernel(function, *rest):
    (address, size), types = rest[8]
    assert types == (ctypes.c_uint64, ctypes.c_uint64)
    assert function == b"leto_read"
    code = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS if _usable(address, size, False) else OK
    for at in range(address, address + size, PAGE):
        if code == OK and ctypes.string_at(at, len(ECC)) == ECC:
            code = CUresult.CUDA_ERROR_CONTAINED
            if os.environ.get("FAKE_CUDA_DIES") == "signal":
                os.kill(os.getpid(), 9)
    _state["dead"] = code
    return (OK,)


def cuMemHostRegister(address, size, flags):
    calls.append("register")
    if size > int(os.environ.get("FAKE_CUDA_PIN_MAX", str(1 << 60))):
        return (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
    registered[address] = size
    return (OK,)


def cuMemHostUnregister(address):
    calls.append("unregister")
    return (INVALID,) if registered.pop(address, None) is None else (OK,)
