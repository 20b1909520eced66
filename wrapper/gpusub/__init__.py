"""Multi-node GPU jobs on Slurm: rendered, placed and submitted without losing or doubling one."""

__version__ = "0.1.0"
