"""Leto for Megatron-Core: GPT pretraining that recovers in place, bit for bit.

`python -m leto_megatron.pretrain` trains (stock under torchrun, recovering under `leto run`);
`python -m leto_megatron.demo` shows four failures and proves the result exact. The trainer itself is
`leto_megatron.trainer.MegatronTrainer`, which imports Megatron-Core only when it runs.
"""

from leto_megatron._version import __version__
from leto_megatron.compare import Comparison, compare_runs
from leto_megatron.config import PRESETS, Config, ConfigError

__all__ = ["PRESETS", "Comparison", "Config", "ConfigError", "__version__", "compare_runs"]
