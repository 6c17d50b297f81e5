# The gpu-worker: model, block pool, kernels. The same file makes the GPU and the CPU image.
FROM python:3.11-slim

# Triton compiles a small launcher in C for each kernel when it first runs.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/coppice coppice
WORKDIR /opt/coppice
COPY pyproject.toml README.md constraints.txt ./
# For the CPU image, where the usual index offers torch with CUDA only: --build-arg TORCH_PIP_ARGS="--index-url ..."
ARG TORCH_PIP_ARGS=""
RUN pip install --no-cache-dir ${TORCH_PIP_ARGS} "$(grep '^torch==' constraints.txt)"
COPY shared shared
COPY services services
# torch chose the triton that it needs; the constraint that pins one for CPU machines must not overrule it.
RUN grep -v '^triton' constraints.txt > constraints.image.txt \
    && pip install --no-cache-dir -c constraints.image.txt '.[worker]'

USER coppice
ENV TRITON_CACHE_DIR=/var/lib/coppice/triton
# 7072: gRPC (Worker). 7082: sessions. 8072: /metrics, /healthz, /readyz.
EXPOSE 7072 7082 8072
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=12 CMD ["coppice", "health", "127.0.0.1:7072"]
ENTRYPOINT ["python", "-m", "coppice_worker"]
CMD ["--host", "0.0.0.0"]
