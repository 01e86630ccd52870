from pallas_kernels.add_rms_norm.dispatch import add_rms_norm, rms_norm

__all__ = ["add_rms_norm", "rms_norm"]
