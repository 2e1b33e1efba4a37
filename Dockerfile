# The verbs in a container, for TPU hosts (examples/kubernetes/jobset.yaml) and CPUs:
#
#     docker build --tag eagle3-jax .
#     mkdir -p runs
#     docker run --rm --user "$(id -u):$(id -g)" --env HOME=/eagle3_jax/runs --volume "$PWD/runs:/eagle3_jax/runs" \
#       eagle3-jax eagle3_jax.prepare --config configs/quickstart.yaml
#
# runs/ belongs to who runs it, and keeps in .cache what was downloaded.
FROM python:3.12-slim

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
RUN useradd --create-home --uid 1000 runner
WORKDIR /eagle3_jax
RUN chown runner:runner /eagle3_jax

# What is downloaded is locked by hash; a change of the code does not download it again.
COPY requirements requirements
RUN pip install --require-hashes --requirement requirements/tpu.txt
COPY pyproject.toml README.md LICENSE ./
COPY eagle3_jax eagle3_jax
RUN pip install --no-build-isolation --no-deps .
COPY configs configs

USER runner
ENTRYPOINT ["python", "-m"]
