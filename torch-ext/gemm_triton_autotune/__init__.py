"""A Triton GEMM whose launch configurations are tuned once and ship as files.

gemm(a, b, bias=)     a @ b + bias, with the configuration tuned for this weight shape and GPU
tune_gemm(N=, K=)     measure and write a tuned file for this GPU
explain(M, N, K)      which configuration a call gets, and why
warmup(N, K)          compile all that calls with a weight can get, before they come
layers.Linear         nn.Linear through gemm, for kernels.kernelize
"""

# By name, since a second load under the same id finds the submodules imported and sets no attributes.
from . import arguments as arguments
from . import bench as bench
from . import calls as calls
from . import candidates as candidates
from . import config as config
from . import cost_model as cost_model
from . import defaults as defaults
from . import device as device
from . import device_tables as device_tables
from . import explanation as explanation
from . import gluon_tiles as gluon_tiles
from . import kernels as kernels
from . import layers as layers
from . import measure as measure
from . import measurements as measurements
from . import op as op
from . import search as search
from . import selection as selection
from . import tuned_file as tuned_file
from . import tuner as tuner
from . import tuning as tuning
from . import warm_up as warm_up
from . import worker as worker
from . import workers as workers
from .explanation import explain
from .op import gemm
from .tuning import tune_gemm
from .warm_up import warmup

__all__ = ["gemm", "tune_gemm", "explain", "warmup", "layers"]
