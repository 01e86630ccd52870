from pallas_kernels.linear.dispatch import linear, linear_parts

__all__ = ["linear", "linear_parts"]
