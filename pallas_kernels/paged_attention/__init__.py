from pallas_kernels.paged_attention.dispatch import paged_attention

__all__ = ["paged_attention"]
