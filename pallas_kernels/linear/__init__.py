from pallas_kernels.linear.dispatch import linear, linear_add_rms_norm, linear_parts

__all__ = ["linear", "linear_add_rms_norm", "linear_parts"]
