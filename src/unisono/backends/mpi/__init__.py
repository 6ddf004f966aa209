"""The mpi backend: any MPI library, through mpi4py.

It needs mpi4py, and mpiexec to start the ranks.
"""
