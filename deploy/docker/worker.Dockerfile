# The gpu-worker: model, block pool, kernels. The CPU image is the default and carries neither CUDA nor Triton; the GPU
# image is made with --build-arg TORCH=cuda.
FROM docker.io/library/python:3.11.14-slim-bookworm AS built
ARG TORCH=cpu
ARG TORCH_PIP_ARGS=""
WORKDIR /src
RUN python -m venv --without-pip /opt/coppice
# What others made first: it changes less often than the code.
COPY pyproject.toml constraints.txt ./
COPY deploy/docker/install-torch ./
RUN touch README.md && sh install-torch
COPY shared shared
COPY tools/coppice_cli tools/coppice_cli
COPY tools/coppice_up tools/coppice_up
COPY services/gpu-worker services/gpu-worker
RUN pip --python /opt/coppice/bin/python install --no-cache-dir --no-deps --force-reinstall . \
    && find /opt/coppice -depth -type d -name tests -exec rm -r {} +

FROM docker.io/library/python:3.11.14-slim-bookworm
# g++ compiles the native kernels for the CPU that is there, when they are first used; Triton compiles a small launcher
# in C for each kernel of the GPU. Compiling needs no link-time optimisation and no sanitizers.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /usr/lib/gcc/*/*/lto1 /usr/bin/*lto-dump* \
    && find /usr/lib -name 'lib*san.*' -delete
RUN useradd --uid 10001 --create-home --home-dir /var/lib/coppice --skel /nonexistent coppice \
    && install -d -o coppice -g coppice -m 0700 /var/lib/coppice-disk
COPY --from=built /opt/coppice /opt/coppice
USER coppice
WORKDIR /var/lib/coppice
ENV PATH=/opt/coppice/bin:$PATH TRITON_CACHE_DIR=/var/lib/coppice/triton
# 7072: gRPC (Worker). 7082: sessions. 8072: /metrics, /healthz, /readyz.
EXPOSE 7072 7082 8072
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=12 CMD ["coppice", "health", "127.0.0.1:7072"]
ENTRYPOINT ["python", "-m", "coppice_worker"]
CMD ["--host", "0.0.0.0"]
