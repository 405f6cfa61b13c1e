"""The CUDA executor: torch for matrix products, kernels of ours for everything over the paged KV pool."""
