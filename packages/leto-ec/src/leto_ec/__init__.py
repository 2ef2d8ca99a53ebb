"""Reed-Solomon erasure code over GF(2^32) for large in-memory state, with delta updates.

`ReedSolomon` encodes, updates and reconstructs; a `Plan` does one of these again and again; `info` says
which kernels this machine runs. The theory is told in `leto_ec.field`.
"""

from leto_ec._engines import info
from leto_ec._version import __version__
from leto_ec.cauchy import coefficient
from leto_ec.code import Reconstruction, ReedSolomon
from leto_ec.errors import BufferMismatch, CodeError, InconsistentParity, ToleranceExceeded
from leto_ec.plan import Plan, ReconstructPlan

__all__ = [
    "BufferMismatch",
    "CodeError",
    "InconsistentParity",
    "Plan",
    "ReconstructPlan",
    "Reconstruction",
    "ReedSolomon",
    "ToleranceExceeded",
    "__version__",
    "coefficient",
    "info",
]
