"""The compilers of machines that are not here: which one a cluster has, and its devices to compile for."""

from .targets import check_compiler, target_devices

__all__ = ["check_compiler", "target_devices"]
