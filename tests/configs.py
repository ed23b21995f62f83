"""Configurations as tests write them."""

import kernels

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)


def make_config(kernel, block_m, block_n, block_k, num_warps, num_stages, **keys):
    """A configuration of the family ``kernel``, with ``keys`` beyond those that all have."""
    plain = gemm_kernel.config.plain_config(block_m, block_n, block_k, num_warps, num_stages)
    return {"kernel": kernel, **plain, **keys}
