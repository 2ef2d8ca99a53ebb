"""Resilient Memory Pool: memory that outlives the process that writes it."""

from leto_rmp._version import __version__

__all__ = ["__version__"]
