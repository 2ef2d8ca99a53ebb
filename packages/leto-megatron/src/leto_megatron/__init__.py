"""Leto for Megatron-Core: GPT pretraining that recovers in place, bit for bit."""

from leto_megatron._version import __version__

__all__ = ["__version__"]
