# The scheduler: OpenAI REST, gRPC, planner. Reads tokenizer and chat template of the checkpoint; needs no torch.
FROM python:3.11-slim

RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/coppice coppice
WORKDIR /opt/coppice
COPY pyproject.toml README.md constraints.txt ./
COPY shared shared
COPY services services
RUN pip install --no-cache-dir -c constraints.txt '.[scheduler]'

USER coppice
# 8000: REST (OpenAI, /healthz, /readyz). 7070: gRPC (Generation). /metrics: where --metrics-port says.
EXPOSE 8000 7070
HEALTHCHECK --interval=5s --timeout=3s --start-period=30s --retries=12 CMD ["coppice", "health", "127.0.0.1:7070"]
ENTRYPOINT ["python", "-m", "coppice_scheduler"]
CMD ["--host", "0.0.0.0"]
