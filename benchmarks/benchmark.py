"""The workloads of `kernels benchmark .`: decode and prefill, on a weight shape that ships tuned.

float16, and inputs scaled so that results stay near 1: the runner compares with an absolute
tolerance of 0.01. On the CPU, in Triton's interpreter, the shapes are small and times mean nothing.
"""

import torch
from kernels.benchmark import Benchmark


class _Workload:
    """Operands and reference; a mixin, because the runner runs every subclass of Benchmark."""

    def _make(self, M: int) -> None:
        N, K = 4096, 4096
        if str(self.device) == "cpu":
            M, N, K = min(M, 32), 128, 128
        self.a = torch.randn(M, K, dtype=torch.float16, device=self.device)
        self.weight = torch.randn(N, K, dtype=torch.float16, device=self.device) * 0.25 * K**-0.5
        self.out = torch.full((M, N), torch.nan, dtype=torch.float16, device=self.device)

    def _run(self) -> None:
        self.kernel.gemm(self.a, self.weight.t(), out=self.out)

    def _reference(self) -> torch.Tensor:
        return torch.mm(self.a, self.weight.t())


class Decode(_Workload, Benchmark):
    seed = 0

    def setup_m1(self) -> None:
        self._make(1)

    def benchmark_m1(self) -> None:
        self._run()

    def verify_m1(self) -> torch.Tensor:
        return self._reference()

    def setup_m16(self) -> None:
        self._make(16)

    def benchmark_m16(self) -> None:
        self._run()

    def verify_m16(self) -> torch.Tensor:
        return self._reference()


class Prefill(_Workload, Benchmark):
    seed = 0

    def setup_m512(self) -> None:
        self._make(512)

    def benchmark_m512(self) -> None:
        self._run()

    def verify_m512(self) -> torch.Tensor:
        return self._reference()

    def setup_m4096(self) -> None:
        self._make(4096)

    def benchmark_m4096(self) -> None:
        self._run()

    def verify_m4096(self) -> torch.Tensor:
        return self._reference()
