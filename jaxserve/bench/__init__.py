"""What `jaxserve bench` measures, and the parts that comparisons with other engines share.

Nothing here imports JAX at module level, so that another engine's process can use it.
"""
