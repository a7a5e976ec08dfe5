# Targets: cpu (the default; it also runs the tests), gpu (SGLang beside the learner) and tpu.
#
#   docker build --target gpu --tag minirl-sql:gpu .
#   mkdir -p runs
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/home/minirl/runs" -v "$PWD/data:/home/minirl/data:ro" \
#     -v "$PWD/models:/home/minirl/models:ro" minirl-sql:gpu --cfg progress.yaml
#
# Arguments are those of launch.train; without any it runs the demo. More: docs/scaling.md.

# What is large and changes less has layers of its own.
# hadolint global ignore=DL3059

FROM python:3.12-slim-trixie AS base
ENV HOME=/home/minirl \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# Anyone may write at home, so that a container can run as the user who owns the mounted folders.
RUN useradd --uid 1000 minirl && mkdir --mode 1777 "$HOME" && pip install pip==26.3
WORKDIR $HOME
# A mark for whoever looks: nothing is stopped by it. Unhealthy is a job that lives and has written
# nothing for two hours; logs of servers do not count.
HEALTHCHECK --interval=5m --timeout=30s --start-period=2h --retries=1 \
    CMD find runs -type f -mmin -120 ! -name "sglang-*.log" | grep -q .

# Enough of the project to install what it depends on, in layers that other changes leave alone.
FROM base AS pins
WORKDIR /opt/minirl-sql
COPY constraints.txt pyproject.toml ./
RUN touch README.md

FROM base AS code
COPY . /opt/minirl-sql
RUN pip install --no-deps --build-constraint /opt/minirl-sql/constraints.txt --prefix /code \
    /opt/minirl-sql

FROM base AS tpu
COPY --from=pins /opt/minirl-sql /opt/minirl-sql
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[tpu]"
COPY --from=code /code /usr/local
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "tpu"]
CMD ["--cfg", "progress-demo.yaml"]

FROM base AS sglang
# SGLang compiles kernels when it runs, and its own are linked with libnuma. Debian keeps one version
# of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/sglang
COPY constraints-sglang.txt ./
RUN python -m venv . && bin/pip install --constraint constraints-sglang.txt torch
RUN bin/pip install --constraint constraints-sglang.txt sglang
# It looks there for CUDA's compiler, which came as a wheel and has its libraries elsewhere.
RUN ln -s "$PWD/lib/python3.12/site-packages/nvidia/cu13" /usr/local/cuda \
    && ln -s lib /usr/local/cuda/lib64 \
    && ln -s libcudart.so.13 /usr/local/cuda/lib/libcudart.so
WORKDIR $HOME

# CUDA 13: its libraries come with the wheels, the host gives the driver.
FROM sglang AS gpu
COPY --from=pins /opt/minirl-sql /opt/minirl-sql
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[gpu]"
COPY --from=code /code /usr/local
# GKE mounts the driver apart; elsewhere it is where all libraries are.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    MINIRL_SGLANG_PYTHON=/opt/sglang/bin/python \
    PATH=$PATH:/opt/sglang/bin
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "gpu"]
CMD ["--cfg", "progress-demo.yaml"]

FROM base AS cpu
COPY --from=pins /opt/minirl-sql /opt/minirl-sql
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[cpu,dev]"
COPY . /opt/minirl-sql
COPY --from=code /code /usr/local
# Whoever runs the tests may not write beside them.
ENV PYTEST_ADDOPTS="-p no:cacheprovider"
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "cpu"]
CMD ["--cfg", "progress-demo.yaml"]
