# Preparing data on Serverless for Apache Spark (Dataproc): Python with ingot, no torch. From the project's root:
# docker build -f images/spark.Dockerfile .   Spark and Java are mounted by the service when it starts, and must not be in here.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Spark's own scripts call ps and tini.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends procps tini \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PYTHONUNBUFFERED=1

# The service runs driver and executors as this user, and looks for it by these numbers.
RUN groupadd --gid 1099 spark && useradd --uid 1099 --gid spark --create-home --home-dir /home/spark spark

WORKDIR /opt/ingot
COPY constraints.txt pyproject.toml images/requirements.py ./
RUN python requirements.py spark > requirements.txt && pip install --constraint constraints.txt --requirement requirements.txt

COPY README.md LICENSE ./
COPY images/ images/
COPY ingot/ ingot/
RUN pip install --no-deps .

ARG COMMIT=unknown
LABEL org.opencontainers.image.title="ingot-spark" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"

ENV PYSPARK_PYTHON=/usr/local/bin/python
USER 1099
WORKDIR /home/spark
