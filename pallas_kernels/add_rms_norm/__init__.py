from pallas_kernels.add_rms_norm.dispatch import add_rms_norm

__all__ = ["add_rms_norm"]
