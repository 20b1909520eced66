"""The checks themselves, one module for what is looked at together.

Importing this package registers them all, in the order in which they are reported.
"""

from gpuhealth.checks import ports  # noqa: F401
from gpuhealth.checks import counters  # noqa: F401
from gpuhealth.checks import roce  # noqa: F401
from gpuhealth.checks import gpudirect  # noqa: F401
from gpuhealth.checks import pcie  # noqa: F401
from gpuhealth.checks import gpus  # noqa: F401
from gpuhealth.checks import xid  # noqa: F401
from gpuhealth.checks import system  # noqa: F401
from gpuhealth.checks import hung  # noqa: F401
