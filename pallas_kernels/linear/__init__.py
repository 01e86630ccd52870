from pallas_kernels.linear.dispatch import (
    linear,
    linear_add_rms_norm,
    linear_parts,
    linear_rope_and_write_kv,
)

__all__ = ["linear", "linear_add_rms_norm", "linear_parts", "linear_rope_and_write_kv"]
