# Telescope on NVIDIA GPUs, as an ordinary user: docs/containers.md. Linted with hadolint, not built by those who wrote it.
#     docker build -f scripts/containers/gpu.Dockerfile -t telescope:gpu .
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]

# Triton and vLLM compile kernels when a run starts, with gcc and Python's headers; the default sandbox. The base image's
# release decides their versions.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        bubblewrap gcc libnuma1 python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 telescope \
    && install -d -o telescope -g telescope /workspace /home/telescope/.cache /home/telescope/.cache/huggingface

# As ./scripts/run installs it anywhere: the stack in a virtual environment beside the checkout, at the locked versions.
COPY . /opt/telescope
RUN chmod -R go+rX /opt/telescope && PIP_NO_CACHE_DIR=1 TELESCOPE_STACK=gpu TELESCOPE_LOCKED=1 /opt/telescope/scripts/run --version
ENV PATH=/opt/telescope/.venv/bin:$PATH

USER 10001:10001
WORKDIR /workspace
# A run's first server, and `telescope serve`. What can't go on ends the container by itself.
HEALTHCHECK --interval=30s --timeout=5s --start-period=15m --retries=5 \
    CMD ["python", "/opt/telescope/scripts/containers/health.py"]
ENTRYPOINT ["telescope"]
CMD ["--help"]
