"""jaxserve: LLM inference in JAX for NVIDIA GPUs."""
