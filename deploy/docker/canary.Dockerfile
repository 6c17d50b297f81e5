# `coppice audit isolation --watch`: two tenants of its own, whose prompts nobody else may notice. Needs no model.
FROM docker.io/library/python:3.11.14-slim-bookworm AS built
WORKDIR /src
RUN python -m venv --without-pip /opt/coppice
# What others made first: it changes less often than the code. As in the image of the cache, so it is built once.
COPY pyproject.toml constraints.txt ./
RUN touch README.md \
    && pip --python /opt/coppice/bin/python install --no-cache-dir -c constraints.txt '.[cache]'
COPY shared shared
COPY tools/coppice_cli tools/coppice_cli
COPY tools/coppice_up tools/coppice_up
COPY tools/coppice_audit tools/coppice_audit
COPY tools/coppice_bench tools/coppice_bench
RUN pip --python /opt/coppice/bin/python install --no-cache-dir --no-deps --force-reinstall . \
    && find /opt/coppice -depth -type d \( -name tests -o -name demo_model \) -exec rm -r {} +

FROM docker.io/library/python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --create-home --home-dir /var/lib/coppice --skel /nonexistent coppice
COPY --from=built /opt/coppice /opt/coppice
USER coppice
WORKDIR /var/lib/coppice
ENV PATH=/opt/coppice/bin:$PATH
# 8076: /metrics, /healthz, /readyz. Prometheus sees whether it lives.
EXPOSE 8076
ENTRYPOINT ["coppice", "audit", "isolation"]
