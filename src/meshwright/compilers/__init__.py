"""The compilers of machines that are not here: which one a cluster has, and its devices to compile for."""

from .targets import target_devices

__all__ = ["target_devices"]
