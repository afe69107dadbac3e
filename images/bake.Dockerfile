# An image of ours with a run's model or data in it, so that nodes and endpoints fetch nothing when they start. `ingot images build --with` uses it.
ARG BASE
# hadolint ignore=DL3006
FROM ${BASE}
ARG NAME
LABEL ingot.run="${NAME}"
COPY --chown=1000:1000 . /ingot/
