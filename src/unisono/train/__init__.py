"""Data-parallel training for programs without torch: NumPy arrays, and trees of them.

uni.train.broadcast_parameters(comm, parameters)
uni.train.average_gradients(comm, gradients)

Gradients can be compressed: `compression=uni.train.ErrorFeedback(uni.train.TopK(0.01))`.
"""

from unisono.train.compression import BFloat16, Compressor, Float16, Int8, RandomK, TopK
from unisono.train.error_feedback import ErrorFeedback
from unisono.train.gradients import GradientAverager, average_gradients, broadcast_parameters

__all__ = [
    "BFloat16",
    "Compressor",
    "ErrorFeedback",
    "Float16",
    "GradientAverager",
    "Int8",
    "RandomK",
    "TopK",
    "average_gradients",
    "broadcast_parameters",
]


def __dir__() -> list[str]:
    """The public names, and nothing else."""
    return __all__
