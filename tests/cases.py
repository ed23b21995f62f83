"""Configurations, operands and launches as the tests of the kernel families want them."""

import kernels
import torch

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)


def make_config(kernel, block_m, block_n, block_k, num_warps, num_stages, **keys):
    """A configuration of the family ``kernel``, with ``keys`` beyond those that all have."""
    plain = gemm_kernel.config.plain_config(block_m, block_n, block_k, num_warps, num_stages)
    return {"kernel": kernel, **plain, **keys}


def forget_defaults():
    """What was chosen for another device, or with another Triton, is not asked again."""
    defaults = gemm_kernel.defaults
    for cache in (defaults._options, defaults._options_for, defaults._default_configs):
        cache.cache_clear()


def make_operands(M, N, K, layout, dtype, device):
    """a (M, K) and b (K, N) in ``layout``, of random numbers."""
    a = torch.randn(M, K, dtype=dtype, device=device)
    if layout == "NT":
        return a, torch.randn(N, K, dtype=dtype, device=device).t()
    return a, torch.randn(K, N, dtype=dtype, device=device)


def launch(a, b, config):
    """``a @ b`` by ``config``, which takes such operands, in an out that was NaN."""
    out = torch.full((a.shape[0], b.shape[1]), torch.nan, dtype=a.dtype, device=a.device)
    assert gemm_kernel.kernels.operand_problem(config, a, b, out) is None
    return gemm_kernel.kernels.launch_gemm_kernel(a, b, out, config)
