"""The workloads of `kernels benchmark .`: decode and prefill, on weight shapes that ship tuned.

float16, and inputs scaled so that results stay near 1: the runner compares with an absolute
tolerance of 0.01. On the CPU, in Triton's interpreter, the shapes are small and times mean nothing.
"""

import functools

import torch
from kernels.benchmark import Benchmark

# (N, K) of Llama 3.1 8B: the output of attention, and both sides of the MLP.
WEIGHTS = ((4096, 4096), (28672, 4096), (4096, 14336))


class _Workload:
    """Operands and reference; a mixin, because the runner runs every subclass of Benchmark."""

    def _make(self, M: int, N: int, K: int) -> None:
        if str(self.device) == "cpu":
            M, N, K = min(M, 32), N // 64, K // 64
        self.a = torch.randn(M, K, dtype=torch.float16, device=self.device)
        self.weight = torch.randn(N, K, dtype=torch.float16, device=self.device) * 0.25 * K**-0.5
        self.out = torch.full((M, N), torch.nan, dtype=torch.float16, device=self.device)

    def _run(self) -> None:
        self.kernel.gemm(self.a, self.weight.t(), out=self.out)

    def _reference(self) -> torch.Tensor:
        return torch.mm(self.a, self.weight.t())


def with_rows(*Ms):
    """Give a class what the runner looks for, for each M and weight: setup_, benchmark_ and verify_."""

    def add(workload: type) -> type:
        for M in Ms:
            for N, K in WEIGHTS:
                name = f"m{M}_n{N}_k{K}"
                setup = functools.partialmethod(_Workload._make, M, N, K)
                setattr(workload, f"setup_{name}", setup)
                setattr(workload, f"benchmark_{name}", _Workload._run)
                setattr(workload, f"verify_{name}", _Workload._reference)
        return workload

    return add


@with_rows(1, 16, 64)
class Decode(_Workload, Benchmark):
    seed = 0


@with_rows(512, 4096)
class Prefill(_Workload, Benchmark):
    seed = 0
