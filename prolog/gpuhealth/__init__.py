"""Health of a GPU node: is it fit for the job that Slurm is about to start on it?

Standard library only, Python 3.9 and newer, so that it runs on nodes without a virtual
environment.
"""
