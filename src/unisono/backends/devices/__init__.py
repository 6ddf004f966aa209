"""Memory of devices: NCCL in front of a backend that moves everything else.

It needs torch and CUDA.
"""
