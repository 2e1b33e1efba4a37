"""What holds for all tests: eight virtual CPU devices, one compute thread per xdist worker, a compiler for TPUs.

All of it is set before JAX is first used. A variable that is already set wins, so that the same tests can run on an
accelerator: `JAX_PLATFORMS=cuda pytest`.
"""

import os

for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    # libtpu compiles ahead of time without a TPU; it is told so here, and that several workers use it at once.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "agg",
}.items():
    os.environ.setdefault(_name, _value)
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of one would only disturb the other
    for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"):
        os.environ.setdefault(_name, "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
