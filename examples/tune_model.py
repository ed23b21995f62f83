"""Tuned files for every weight of a model that has none yet, in your own cache.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python examples/tune_model.py

After `make build`; without a GPU with TRITON_INTERPRET=1, in a small size.
"""

import torch
from kernels import get_kernel

gemm_kernel = get_kernel("kernels-test/gemm-triton-autotune", version=1)

on_gpu = torch.cuda.is_available()
width, hidden = (1024, 2816) if on_gpu else (16, 32)
model = torch.nn.Sequential(  # yours
    torch.nn.Linear(width, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, width)
)
# The numbers of rows that the model will see; without this, 26 from 1 to 8192.
Ms = (1, 16, 2048) if on_gpu else (1, 4)

shapes = {tuple(m.weight.shape) for m in model.modules() if isinstance(m, torch.nn.Linear)}
for N, K in sorted(shapes):
    # A layer multiplies with the transpose of its weight: layout NT.
    # Where there is no such file, one for the other layout serves.
    name = gemm_kernel.tuning.config_file_name(N, K, layout="NT")
    if f"{name}, entry" not in gemm_kernel.explain(M=Ms[0], N=N, K=K, layout="NT"):
        print(f"wrote {gemm_kernel.tune_gemm(N=N, K=K, Ms=Ms, layout='NT')}")
    print(gemm_kernel.explain(M=Ms[0], N=N, K=K, layout="NT"))
