"""What `jaxserve bench` measures, and the parts that comparisons with other engines share.

Only `ceilings`, `engine` and `profile` need JAX, so that another engine's process can use the rest.
"""
