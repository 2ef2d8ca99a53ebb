"""Reed-Solomon erasure code over GF(2^32) for large in-memory state, with delta updates."""

from leto_ec._version import __version__

__all__ = ["__version__"]
