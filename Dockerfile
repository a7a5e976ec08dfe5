# docker build --build-arg ACCEL=gpu -t minirl-sql .
# mkdir -p runs
# docker run --gpus all --user "$(id -u):$(id -g)" --env HOME=/tmp -v "$PWD/runs:/home/minirl/runs" \
#   -v "$PWD/data:/home/minirl/data:ro" -v "$PWD/models:/home/minirl/models:ro" \
#   minirl-sql --accel gpu --cfg progress.yaml
FROM python:3.12-slim

# cpu, gpu (CUDA 13; its libraries come with JAX's wheels, the host gives the driver) or tpu
ARG ACCEL=cpu

# Others may enter, so that a container can run as the user who owns the mounted folders.
RUN useradd --create-home minirl && chmod 755 /home/minirl
WORKDIR /opt/minirl-sql
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt ".[${ACCEL}]"

USER minirl
WORKDIR /home/minirl
ENTRYPOINT ["python", "-m", "launch.train"]
