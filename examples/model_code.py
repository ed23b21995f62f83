"""gemm in model code of your own.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python examples/model_code.py

After `make build`; without a GPU with TRITON_INTERPRET=1, in a small size.
"""

import torch
from kernels import get_kernel

gemm_kernel = get_kernel("kernels-test/gemm-triton-autotune", version=1)


class MLP(torch.nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.randn(hidden, width) * width**-0.5)
        self.up_bias = torch.nn.Parameter(torch.zeros(hidden))
        self.down = torch.nn.Parameter(torch.randn(width, hidden) * hidden**-0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(gemm_kernel.gemm(x, self.up.t(), bias=self.up_bias))
        return gemm_kernel.gemm(hidden, self.down.t())


device = "cuda" if torch.cuda.is_available() else "cpu"
width, hidden = (4096, 14336) if device == "cuda" else (64, 128)
mlp = MLP(width, hidden).to(device, torch.bfloat16)
x = torch.randn(16, width, dtype=torch.bfloat16, device=device)

mlp(x).square().mean().backward()
print(gemm_kernel.explain(M=16, N=hidden, K=width, layout="NT"))
print(f"gradient of the first weight: {tuple(mlp.up.grad.shape)}, norm {mlp.up.grad.norm():.3g}")
