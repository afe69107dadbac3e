# Serving: ingot's own server, by Vertex AI's contract (AIP_*). From the project's root: docker build -f images/serve.Dockerfile .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libc6-dev tini \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

RUN groupadd --gid 1000 ingot && useradd --uid 1000 --gid ingot --create-home ingot && install --directory --owner=ingot --group=ingot /ingot

# torch's builds lie in an index of their own: `cpu`, or `cu126` where a GPU answers.
WORKDIR /opt/ingot
ARG TORCH_BUILD=cpu
COPY constraints.txt ./
RUN pip install --extra-index-url "https://download.pytorch.org/whl/${TORCH_BUILD}" "$(grep '^torch==' constraints.txt)+${TORCH_BUILD}"

COPY pyproject.toml images/requirements.py ./
RUN python requirements.py serve > requirements.txt && pip install --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY images/ images/
COPY ingot/ ingot/
RUN pip install --no-deps . && install images/serve.sh /usr/local/bin/ingot-serve

ARG COMMIT=unknown
LABEL org.opencontainers.image.title="ingot-serve" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"

# What the service sets goes over this: AIP_HTTP_PORT, AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE, AIP_STORAGE_URI.
ENV AIP_HTTP_PORT=8080 \
    MODEL_FOLDER=/ingot/model
EXPOSE 8080
USER 1000
WORKDIR /ingot
ENTRYPOINT ["/usr/bin/tini", "--", "/usr/local/bin/ingot-serve"]
