"""The gloo backend: Gloo, as torch ships it.

It needs torch.
"""
