"""The kernel of `tiled` as a user of `@triton.autotune` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import kernels
import torch
import triton

gemm_kernel = kernels.get_kernel("kernels-test/gemm-triton-autotune", version=1)
measure, tiled = gemm_kernel.measure, gemm_kernel.kernels.tiled


class Autotuned:
    """For M rows on a device: the first call with an M, N and K measures each configuration.

    cache_results: keep what was measured in Triton's cache on disk, for later processes.
    """

    def __init__(self, M: int, device: torch.device, cache_results: bool = False) -> None:
        self.measured = 0
        configs = [
            triton.Config(
                {key: value for key, value in config.items() if key.isupper()},
                num_warps=config["num_warps"],
                num_stages=config["num_stages"],
            )
            for config in autotune_configs(M, device)
        ]
        tuned = triton.autotune(
            configs, key=["M", "N", "K"], do_bench=self._do_bench, cache_results=cache_results
        )
        even_k = triton.heuristics(
            {"EVEN_K": lambda values: values["K"] % values["BLOCK_SIZE_K"] == 0}
        )
        self._kernel = tuned(even_k(tiled._tiled_kernel))
        self._timer = measure.own_timer(device)

    def _do_bench(self, call: Callable[[], Any], quantiles: Sequence[float]) -> Any:
        """The decorator's own way to measure, counted."""
        self.measured += 1
        if self._timer is not None:
            return [self._timer(call)] * len(quantiles)
        return triton.runtime.driver.active.get_benchmarker()(call, quantiles=quantiles)

    def __call__(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        (M, K), N = a.shape, b.shape[1]
        self._kernel[
            lambda values: (
                triton.cdiv(M, values["BLOCK_SIZE_M"]) * triton.cdiv(N, values["BLOCK_SIZE_N"]),
            )
        ](
            *(a, b, out, None, M, N, K, *a.stride(), *b.stride(), *out.stride()),
            M_MULTIPLE_OF_16=M % 16 == 0 and 1 in (a.stride(0), out.stride(0)),
        )
        return out

    @property
    def best(self) -> dict[str, Any]:
        """The configuration of the latest call."""
        chosen = self._kernel.best_config
        options = {"num_warps": chosen.num_warps, "num_stages": chosen.num_stages}
        return {**chosen.kwargs, **options}


def autotune_configs(M: int, device: torch.device) -> list[dict[str, Any]]:
    """What `candidate_configs` has of `tiled` for M rows, of any weight: a decorator's list knows none."""
    properties = gemm_kernel.device.device_properties(device)
    found = gemm_kernel.tuning.candidate_configs(M, properties=properties)
    return [config for config in found if gemm_kernel.config.family_of(config) == tiled.NAME]
