"""Which build of the kernel is loaded: LOCAL_KERNELS puts one of your own in the place of the Hub's.

    LOCAL_KERNELS=kernels-test/gemm-triton-autotune=$PWD python examples/local_kernels.py

No network is asked then, and nothing compares versions: what lies there is what runs.
"""

import os

from kernels import get_kernel, get_loaded_kernels

gemm_kernel = get_kernel("kernels-test/gemm-triton-autotune", version=1)

metadata = get_loaded_kernels()[-1].metadata
print(
    f"LOCAL_KERNELS is {os.environ.get('LOCAL_KERNELS', 'not set: this is the build of the Hub')}"
)
print(
    f"loaded {metadata.name}, version {metadata.version}, from {os.path.dirname(gemm_kernel.__file__)}"
)
print(f"its tuned files are looked for in {', '.join(map(str, gemm_kernel.tuning.search_path()))}")
