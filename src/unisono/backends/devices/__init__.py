"""Memory of devices: NCCL beside a backend that moves everything else.

It needs torch and CUDA.
"""
