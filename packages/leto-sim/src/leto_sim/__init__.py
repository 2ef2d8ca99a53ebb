"""Simulator of training under failures: iteration time, recovery time and ETTR up to 131,072 GPUs."""

from leto_sim._version import __version__

__all__ = ["__version__"]
