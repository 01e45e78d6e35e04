# Training image. The default base is small and CPU-only; for CUDA choose a PyTorch image, whose
# own torch is then kept when its version is the pinned one:
#   docker build --build-arg BASE_IMAGE=pytorch/pytorch:<tag> --build-arg TORCH_INDEX= -t draftsmith .
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=gguf,redis,schedule
ARG UID=1000

ENV PATH=/opt/draftsmith/bin:$PATH \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    GIT_PYTHON_REFRESH=quiet

# System packages stay visible so that a torch of the base image is used, not installed twice.
RUN python3 -m venv --system-site-packages /opt/draftsmith

WORKDIR /src
# torch in a layer of its own: it is the largest and changes least.
COPY constraints constraints
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c constraints/cpu.txt torch

COPY pyproject.toml README.md LICENSE ./
COPY pipeline pipeline
COPY lightning_modules lightning_modules
COPY datamodules datamodules
COPY serving_bridge serving_bridge
COPY drafters drafters
COPY configs configs
RUN pip install -c constraints/cpu.txt ".[${EXTRAS}]"

# Base images may already own the id (1000 on Ubuntu), hence a numeric user and no useradd.
WORKDIR /workspace
COPY configs configs
RUN chown -R "${UID}:${UID}" /workspace
# No passwd entry, so libraries that ask for the user name read it here.
ENV HOME=/workspace USER=draftsmith
USER ${UID}:${UID}

ENTRYPOINT ["draftsmith"]
CMD ["--help"]
