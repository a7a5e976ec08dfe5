# Targets: cpu (the default; it also runs the tests), gpu (SGLang beside the learner) and tpu.
#
#   docker build --target gpu --tag minirl-sql:gpu .
#   mkdir -p runs
#   docker run --rm --gpus all --ipc host --user "$(id -u):$(id -g)" \
#     -v "$PWD/runs:/home/minirl/runs" -v "$PWD/data:/home/minirl/data:ro" \
#     -v "$PWD/models:/home/minirl/models:ro" minirl-sql:gpu --cfg progress.yaml
#
# Arguments are those of launch.train; without any it runs the demo. More: docs/deployment.md.

# What is large and changes less has layers of its own.
# hadolint global ignore=DL3059

FROM python:3.12-slim-trixie AS base
ENV HOME=/home/minirl \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
# Anyone may write at home, so that a container can run as the user who owns the mounted folders.
RUN useradd --uid 1000 minirl && mkdir --mode 1777 "$HOME"
WORKDIR /opt/minirl-sql
COPY constraints.txt pyproject.toml ./
# What the project depends on is installed without it, into layers that its changes leave alone. The
# README belongs to the package; here it need not be there in full.
RUN touch README.md && pip install --constraint constraints.txt --upgrade pip
WORKDIR $HOME
# A mark for whoever looks: nothing is stopped by it. That the process lives is known anyway, so it
# tells of a job that lives and hangs: nothing new in its folder for two hours. What takes longer,
# for example the first check of a large data set, wants a --health-cmd of its own.
HEALTHCHECK --interval=5m --timeout=30s --start-period=1m --retries=1 \
    CMD ["python", "-m", "launch.health", "--quiet-s", "7200"]

FROM base AS code
COPY . /opt/minirl-sql
RUN pip install --no-deps --build-constraint /opt/minirl-sql/constraints.txt --prefix /code \
    /opt/minirl-sql

FROM base AS tpu
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[tpu]"
COPY --from=code /code /usr/local
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "tpu"]
CMD ["--cfg", "progress-demo.yaml"]

# CUDA 13: its libraries come with the wheels, the host gives the driver.
FROM base AS gpu
# SGLang compiles kernels when it runs, and its own are linked with libnuma.
# Debian keeps one version of a package.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libnuma1 \
    && rm -rf /var/lib/apt/lists/*
COPY constraints-sglang.txt /opt/minirl-sql/
RUN python -m venv /opt/sglang \
    && /opt/sglang/bin/pip install --constraint /opt/minirl-sql/constraints-sglang.txt torch
RUN /opt/sglang/bin/pip install --constraint /opt/minirl-sql/constraints-sglang.txt sglang
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[gpu]"
# SGLang looks there for CUDA's compiler, which came as a wheel and has its libraries elsewhere.
RUN ln -s /opt/sglang/lib/python3.12/site-packages/nvidia/cu13 /usr/local/cuda \
    && ln -s lib /usr/local/cuda/lib64 \
    && ln -s libcudart.so.13 /usr/local/cuda/lib/libcudart.so
COPY --from=code /code /usr/local
# The driver is where GKE mounts it; others put it where all libraries are.
ENV LD_LIBRARY_PATH=/usr/local/nvidia/lib64 \
    MINIRL_SGLANG_PYTHON=/opt/sglang/bin/python \
    PATH=$PATH:/opt/sglang/bin
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "gpu"]
CMD ["--cfg", "progress-demo.yaml"]

FROM base AS cpu
RUN pip install --only-deps --constraint /opt/minirl-sql/constraints.txt \
    --build-constraint /opt/minirl-sql/constraints.txt "/opt/minirl-sql[cpu,dev]"
COPY . /opt/minirl-sql
COPY --from=code /code /usr/local
# Whoever runs the tests may not write beside them.
ENV PYTEST_ADDOPTS="-p no:cacheprovider"
USER 1000
ENTRYPOINT ["python", "-m", "launch.train", "--accel", "cpu"]
CMD ["--cfg", "progress-demo.yaml"]
