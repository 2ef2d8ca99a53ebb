"""Shadow trainers, node agent and coordinator: in-place takeover of a failed trainer."""

from leto_shadow._version import __version__

__all__ = ["__version__"]
