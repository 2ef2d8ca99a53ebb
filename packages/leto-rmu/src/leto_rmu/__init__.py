"""Resumable Model Updater: optimizer steps as chunk transactions that survive a crash."""

from leto_rmu._version import __version__

__all__ = ["__version__"]
