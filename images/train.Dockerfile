# Training: torch for CUDA, ingot and all that its verbs may call. From the project's root: docker build -f images/train.Dockerfile .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# The compiler is for torch.compile, which builds its kernels where it runs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev procps tini \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

RUN groupadd --gid 1000 ingot && useradd --uid 1000 --gid ingot --create-home ingot && install --directory --owner=ingot --group=ingot /ingot

# What changes least comes first. torch's builds for each CUDA, and for none (`cpu`), lie in an index of their own. cu126 runs on every driver since
# 525 and on GPUs up to the H200; the B200 wants cu130.
WORKDIR /opt/ingot
ARG TORCH_BUILD=cu126
COPY constraints.txt ./
RUN pip install --extra-index-url "https://download.pytorch.org/whl/${TORCH_BUILD}" "$(grep '^torch==' constraints.txt)+${TORCH_BUILD}"

COPY pyproject.toml images/requirements.py ./
RUN python requirements.py train > requirements.txt && pip install --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY images/ images/
COPY ingot/ ingot/
RUN pip install --no-deps . && install images/train.sh /usr/local/bin/ingot-train

ARG COMMIT=unknown
LABEL org.opencontainers.image.title="ingot-train" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"

USER 1000
WORKDIR /ingot
ENTRYPOINT ["/usr/bin/tini", "-g", "--", "/usr/local/bin/ingot-train"]
