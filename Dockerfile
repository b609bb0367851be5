# lmhead serve on a CPU, as a user without rights. The model lives in a volume:
#   docker build -t lmhead .
#   docker run --rm -v lmhead:/data lmhead pull smollm2-135m
#   docker run --rm -p 127.0.0.1:8401:8401 -v lmhead:/data -e LMHEAD_KEY=a-long-secret lmhead
FROM python:3.11-slim

RUN useradd --create-home --uid 10001 lmhead && mkdir /data && chown lmhead /data
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
# Give pip an index with torch's wheels for the CPU alone (--build-arg PIP_EXTRA_INDEX_URL=...):
# the ordinary ones bring gigabytes for cards that are not here.
ARG PIP_EXTRA_INDEX_URL
RUN pip install --no-cache-dir --constraint constraints.txt '.[serve,guided]'

USER lmhead
ENV LMHEAD_CACHE=/data HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
VOLUME /data
EXPOSE 8401
HEALTHCHECK --start-period=120s CMD \
  python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8401/healthz', timeout=5)"
ENTRYPOINT ["lmhead"]
# Inside a container 0.0.0.0 is the only address that can be reached, so a key is needed.
CMD ["serve", "--host", "0.0.0.0", "--api-key-env", "LMHEAD_KEY"]
