# The cache service: radix trees, block ledger, leases. Needs no model and no torch.
FROM python:3.11-slim

RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/coppice coppice
WORKDIR /opt/coppice
COPY pyproject.toml README.md constraints.txt ./
COPY shared shared
COPY services services
RUN pip install --no-cache-dir -c constraints.txt '.[cache]'

USER coppice
# 7071: gRPC (PrefixIndex). 7081: sessions. 8071: admin REST, /metrics, /healthz, /readyz.
EXPOSE 7071 7081 8071
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=6 CMD ["coppice", "health", "127.0.0.1:7071"]
ENTRYPOINT ["python", "-m", "coppice_cache"]
CMD ["--host", "0.0.0.0"]
