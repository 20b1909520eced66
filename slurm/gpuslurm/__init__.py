"""Slurm as gpusub and gpuadm see it: partitions, nodes and jobs, and how to reach them."""
