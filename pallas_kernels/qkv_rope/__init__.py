from pallas_kernels.qkv_rope.dispatch import qkv_rope

__all__ = ["qkv_rope"]
