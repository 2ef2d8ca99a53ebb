"""Callers' GPU buffers as page addresses: CuPy, torch, `__cuda_array_interface__` and DLPack, never copied.

The counterpart of `leto_ec._buffers`: everything that can be wrong with a buffer is found before anything
is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from leto_ec.errors import BufferMismatch
from leto_ec.field import WORD_BYTES

__all__ = ["DeviceGroup", "View", "collect", "same_device", "view"]

MANAGED_OR_DEVICE = (2, 3)  # cudaMemoryTypeDevice, cudaMemoryTypeManaged


@dataclass(frozen=True)
class View:
    """One GPU buffer of uint8."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: int
    read_only: bool
    torch: bool
    owner: Any  # keeps the memory alive


class DeviceGroup:
    """Pages of one length on one device. Address 0 is an absent page."""

    __slots__ = ("addresses", "device", "owners", "page_bytes", "torch")

    def __init__(
        self, addresses: NDArray[np.int64], page_bytes: int, device: int, owners: Sequence[Any], torch: bool
    ) -> None:
        self.addresses = addresses
        self.page_bytes = page_bytes
        self.device = device
        self.owners = owners
        self.torch = torch

    def __len__(self) -> int:
        return len(self.addresses)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> DeviceGroup:
        """Return the pages at these indices, in this order."""
        chosen = self.addresses[np.asarray(indices, np.int64)]
        return DeviceGroup(chosen, self.page_bytes, self.device, self.owners, self.torch)

    def window(self, start: int, stop: int) -> DeviceGroup:
        """Return bytes start..stop of every page."""
        moved = np.where(self.addresses == 0, 0, self.addresses + start)
        return DeviceGroup(moved, stop - start, self.device, self.owners, self.torch)


def view(buffer: Any, what: str) -> View:
    """Return address, shape and device of one GPU buffer of uint8.

    Raises
    ------
    BufferMismatch
        Not GPU memory, or its elements are not uint8.
    """
    try:
        if hasattr(buffer, "data_ptr") and hasattr(buffer, "detach"):  # a torch tensor; torch is not imported
            found = str(buffer.dtype).removeprefix("torch.")
            if found == "uint8":
                return View(
                    buffer.data_ptr(),
                    tuple(buffer.shape),
                    tuple(buffer.stride()),
                    int(buffer.device.index),
                    False,
                    True,
                    buffer,
                )
        else:
            if not hasattr(buffer, "__cuda_array_interface__"):
                buffer = cupy.from_dlpack(buffer)
            interface = buffer.__cuda_array_interface__
            found = np.dtype(interface["typestr"]).name
            if found == "uint8":
                shape = tuple(interface["shape"])
                strides = interface.get("strides")
                if strides is None:
                    strides = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
                address, read_only = interface["data"]
                ordinal = buffer.device.id if isinstance(buffer, cupy.ndarray) else _device_of(address, what)
                return View(address, shape, tuple(strides), int(ordinal), bool(read_only), False, buffer)
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError, KeyError) as error:
        raise BufferMismatch(
            f"{what}: a CuPy array, torch CUDA tensor, or an object with __cuda_array_interface__ or DLPack "
            f"is expected, found {type(buffer).__name__} ({error})"
        ) from error
    raise BufferMismatch(f"{what}: elements of uint8 are expected, found {found}; pass a uint8 view")


def _device_of(address: int, what: str) -> int:
    if address == 0:
        return int(cupy.cuda.Device().id)
    attributes = cupy.cuda.runtime.pointerGetAttributes(address)
    if attributes.type not in MANAGED_OR_DEVICE:
        raise BufferMismatch(f"{what}: GPU memory is expected, found address {address:#x} elsewhere")
    return int(attributes.device)


def collect(
    buffers: Any,
    what: str,
    *,
    page_bytes: int | None = None,
    writable: bool = False,
    whole_words: bool = True,
    absent: bool = False,
) -> DeviceGroup:
    """Return the pages of a (n, page_bytes) buffer or of a sequence of one-dimensional ones; see the host's
    `collect`.

    Raises
    ------
    BufferMismatch
    """
    if isinstance(buffers, (list, tuple)):
        views = [
            None if absent and buffer is None else view(buffer, f"{what}[{index}]")
            for index, buffer in enumerate(buffers)
        ]
        present = [(index, each) for index, each in enumerate(views) if each is not None]
        if not present:
            raise BufferMismatch(f"{what}: at least one page is expected, found none")
        for index, each in present:
            if len(each.shape) != 1:
                raise BufferMismatch(
                    f"{what}[{index}]: a one-dimensional buffer is expected, found shape {each.shape}"
                )
            if each.shape[0] > 1 and each.strides[0] != 1:
                raise BufferMismatch(
                    f"{what}[{index}]: the bytes of a page must be contiguous, found stride {each.strides[0]}"
                )
        first, one = present[0]
        length = one.shape[0]
        for index, each in present:
            if each.shape[0] != length:
                raise BufferMismatch(
                    f"{what}: pages of {length} bytes are expected, as page {first} is; "
                    f"page {index} has {each.shape[0]}"
                )
            if each.device != one.device:
                raise BufferMismatch(
                    f"{what}: all pages on GPU {one.device} are expected, as page {first} is; "
                    f"page {index} is on GPU {each.device}"
                )
        addresses = np.array([0 if each is None else each.address for each in views], np.int64)
        read_only = any(each.read_only for _, each in present)
        owners: list[Any] = [each.owner for _, each in present]
    else:
        one = view(buffers, what)
        if len(one.shape) != 2 or one.shape[0] == 0:
            raise BufferMismatch(
                f"{what}: shape (pages, page_bytes) or a list of pages is expected, found shape {one.shape}"
            )
        count, length = one.shape
        if length > 1 and one.strides[1] != 1:
            raise BufferMismatch(
                f"{what}: the bytes of a page must be contiguous, found strides {one.strides}"
            )
        addresses = one.address + np.arange(count, dtype=np.int64) * one.strides[0]
        read_only, owners = one.read_only, [one.owner]
    if page_bytes is not None and length != page_bytes:
        raise BufferMismatch(f"{what}: pages of {page_bytes} bytes are expected, found {length}")
    if whole_words:
        if length == 0 or length % WORD_BYTES:
            raise BufferMismatch(
                f"{what}: page_bytes must be a positive multiple of {WORD_BYTES}, found {length}"
            )
        if (addresses % WORD_BYTES).any():
            raise BufferMismatch(
                f"{what}: pages must begin at a multiple of {WORD_BYTES} bytes in GPU memory"
            )
    if writable and read_only:
        raise BufferMismatch(f"{what}: writable memory is expected, but it is read-only")
    return DeviceGroup(addresses, length, one.device, owners, one.torch)


def same_device(groups: Sequence[tuple[DeviceGroup, str]]) -> int:
    """Return the device that holds all groups.

    Raises
    ------
    BufferMismatch
    """
    first, name = groups[0]
    for group, other in groups:
        if group.device != first.device:
            raise BufferMismatch(
                f"buffers on one GPU are expected, but {name} is on GPU {first.device} "
                f"and {other} on GPU {group.device}"
            )
    return first.device
