from pallas_kernels.rope_and_write_kv.dispatch import rope_and_write_kv

__all__ = ["rope_and_write_kv"]
