# The scheduler: OpenAI REST, gRPC, planner. Reads tokenizer and chat template of the checkpoint; needs no torch.
FROM docker.io/library/python:3.11.14-slim-bookworm AS built
WORKDIR /src
RUN python -m venv --without-pip /opt/coppice
COPY pyproject.toml constraints.txt ./
# no: the core stays source, and the image is made minutes sooner.
ARG COMPILED=yes
# What compiles the core. It stays behind.
RUN [ "$COMPILED" = no ] || { \
    apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir --target /opt/compiler -c constraints.txt mypy setuptools; }
# What others made first: it changes less often than the code.
RUN touch README.md \
    && pip --python /opt/coppice/bin/python install --no-cache-dir -c constraints.txt '.[scheduler]'
COPY shared shared
# The core, and what it is compiled for, before the rest: compiling takes minutes.
COPY scripts/compile_cores.py scripts/compile_cores.py
COPY services/scheduler/coppice_scheduler/core services/scheduler/coppice_scheduler/core
RUN [ "$COMPILED" = no ] || { \
    PYTHONPATH=/src/shared:/opt/compiler /opt/coppice/bin/python -m scripts.compile_cores scheduler \
    && mv services/scheduler/coppice_scheduler/_compiled /opt/compiled; }
COPY tools/coppice_cli tools/coppice_cli
COPY tools/coppice_up tools/coppice_up
COPY services/scheduler services/scheduler
RUN pip --python /opt/coppice/bin/python install --no-cache-dir --no-deps --force-reinstall . \
    && find /opt/coppice -depth -type d -name tests -exec rm -r {} + \
    && { [ "$COMPILED" = no ] || { \
    mv /opt/compiled "$(echo /opt/coppice/lib/python3*/site-packages/coppice_scheduler)/_compiled" \
    && COPPICE_COMPILED=always /opt/coppice/bin/python -c 'import coppice_scheduler.core.engine'; }; }

FROM docker.io/library/python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/coppice --skel /nonexistent coppice
COPY --from=built /opt/coppice /opt/coppice
USER coppice
WORKDIR /var/lib/coppice
ENV PATH=/opt/coppice/bin:$PATH
# 8000: REST (OpenAI, /healthz, /readyz). 7070: gRPC (Generation). /metrics: where --metrics-port says.
EXPOSE 8000 7070
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=12 \
    CMD coppice health "http${COPPICE_SCHEDULER_SSL_CERTFILE:+s}://127.0.0.1:8000"
ENTRYPOINT ["python", "-m", "coppice_scheduler"]
CMD ["--host", "0.0.0.0"]
